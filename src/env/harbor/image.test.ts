import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { apply, type NewEvent, type RunState } from '../../core/index.ts';
import type { Sandbox } from '../../sandbox/contract.ts';
import { BubblewrapDriver, ImageStore, probeBubblewrap } from '../../sandbox/index.ts';
import { type HarborSession, harborEnvironment } from './environment.ts';
import { runSolution } from './solution.ts';
import type { LoadOptions, TaskImage } from './task.ts';

const EXAMPLE = resolve(import.meta.dirname, '../../../recipes/tasks/stock-database');
const BUSYBOX = '/bin/busybox';
const MIB = 1024 * 1024;

const root = mkdtempSync(join(tmpdir(), 'harbor-image-'));
const probe = await probeBubblewrap({ dir: join(root, 'probe') });
const lacking = probe.ok ? '' : ` (skipped: ${probe.reason})`;
afterAll(() => rmSync(root, { recursive: true, force: true }));

/** The state of a run whose agent said that it is done. */
function ended(): RunState {
  const events: NewEvent[] = [
    {
      type: 'run.created',
      data: {
        kind: 'rollout',
        task: { name: 'harbor', ref: 'x' },
        agent: 'coder',
        model: { ref: 'test/model' },
        seed: 1,
        budget: {},
      },
    },
    { type: 'message.added', data: { message: { role: 'assistant', content: 'Done.' } } },
  ];
  return events.reduce<RunState | null>(
    (state, event, i) =>
      apply(state, {
        ...event,
        runId: '01ARZ3NDEKTSV4RRFFQ69G5FAV',
        seq: i + 1,
        at: new Date(i).toISOString(),
        v: 1,
      }),
    null,
  )!;
}

describe.skipIf(!probe.ok)(`tasks with an image${lacking}`, () => {
  let driver: BubblewrapDriver;
  let store: ImageStore;
  let options: LoadOptions;
  const built: boolean[] = [];
  let count = 0;

  beforeAll(async () => {
    driver = await BubblewrapDriver.open({ dir: join(root, 'driver'), warm: 0 });
    store = new ImageStore({ driver, spec: { diskBytes: 64 * MIB, memoryBytes: 256 * MIB } });
    const image = ({ digest, config }: Awaited<ReturnType<ImageStore['get']>>): TaskImage => ({
      image: `rootfs:${digest}`,
      workdir: config.workdir ?? '/workspace',
      notes: [],
    });
    options = {
      async buildImage({ context, dockerfile, runTimeoutMs }) {
        const made = await store.build({ context, dockerfile, runTimeoutMs });
        built.push(made.steps.some((step) => !step.cached));
        return image(made.image);
      },
      resolveImage: async (name) => image(await store.get(name)),
    };
  });
  afterAll(() => driver.close());

  function taskDir(files: Record<string, string>): string {
    const dir = join(root, `task-${++count}`);
    const all = { 'instruction.md': 'Do it.', 'task.toml': '', ...files };
    for (const [name, text] of Object.entries(all)) {
      mkdirSync(dirname(join(dir, name)), { recursive: true });
      writeFileSync(join(dir, name), text);
    }
    return dir;
  }

  async function inSandbox(
    dir: string,
    body: (session: HarborSession, sandbox: Sandbox) => Promise<void>,
  ): Promise<void> {
    const environment = harborEnvironment(options);
    const session = await environment.open(await environment.refOf(dir));
    const sandbox = await driver.create(session.sandbox);
    try {
      await session.prepare(sandbox);
      await body(session, sandbox);
    } finally {
      await sandbox.stop();
    }
  }

  const sh = async (sandbox: Sandbox, script: string) => {
    const { code, stdout, stderr } = await sandbox.exec({ argv: ['/bin/sh', '-c', script] });
    return { code, said: stdout + stderr };
  };

  it('stock-database: the solution scores 1, doing nothing 0, and the second build is none', async () => {
    built.length = 0;
    await inSandbox(EXAMPLE, async (session, sandbox) => {
      expect((await session.grade(ended(), sandbox)).reward).toMatchObject({ value: 0 });
      expect(await runSolution(session.task, sandbox)).toMatchObject({ code: 0, stderr: '' });
      expect((await session.grade(ended(), sandbox)).reward).toMatchObject({ value: 1 });
    });
    // `refOf` opened the task first.
    expect(built).toEqual([true, false]);
  });

  it('start in the image’s directory, and so do relative paths of file calls', async () => {
    const dir = taskDir({
      'environment/Dockerfile':
        'FROM host\nENV WHERE=there\nWORKDIR /opt/app\nRUN echo built > from-build\n',
      'tests/test.sh':
        '[ "$PWD $WHERE $HOME $(cat made)" = "/opt/app there /tmp/verifier-home x" ] && echo 1 > /logs/verifier/reward.txt\n',
    });
    await inSandbox(dir, async (session, sandbox) => {
      expect(await sh(sandbox, 'pwd; cat from-build')).toEqual({
        code: 0,
        said: '/opt/app\nbuilt\n',
      });
      await sandbox.writeFile('made', 'x');
      expect(await sh(sandbox, 'cat /opt/app/made')).toEqual({ code: 0, said: 'x' });
      expect((await sandbox.listFiles('.')).map(({ name }) => name)).toEqual([
        'from-build',
        'made',
      ]);
      expect((await session.grade(ended(), sandbox)).reward).toMatchObject({ value: 1 });
    });
  });

  it('keep what the agent changes anywhere in a snapshot, and lose tests and logs that it planted', async () => {
    const dir = taskDir({
      'environment/Dockerfile': 'FROM host\nRUN true\n',
      'tests/test.sh':
        '[ -e /tests/planted ] && exit; [ "$(cat /etc/mine /srv/mine)" = "ab" ] && echo 1 > /logs/verifier/reward.txt\n',
    });
    await inSandbox(dir, async (session, sandbox) => {
      await sh(sandbox, 'printf a > /etc/mine; printf b > /srv/mine');
      const layer = await sandbox.snapshot({ durable: true });
      await sh(
        sandbox,
        'rm /srv/mine; mkdir -p /tests /logs/verifier; echo > /tests/planted; echo 0.5 > /logs/verifier/reward.json',
      );
      // A reward that was planted is not read.
      expect((await session.grade(ended(), sandbox)).reward).toMatchObject({
        status: 'grader_error',
      });
      const again = await driver.create(session.sandbox, layer);
      try {
        expect((await session.grade(ended(), again)).reward).toMatchObject({ value: 1 });
      } finally {
        await again.stop();
      }
    });
  });

  it('cannot have the host’s programs replaced, whatever the agent does to its root', async () => {
    const dir = taskDir({
      'environment/Dockerfile': 'FROM host\nRUN true\n',
      'tests/test.sh': 'echo 0 > /logs/verifier/reward.txt\n',
    });
    await inSandbox(dir, async (session, sandbox) => {
      const evil = '#!/usr/bin/sh\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n';
      await sandbox.writeFile('/srv/evil', evil);
      await sh(
        sandbox,
        'cd /; chmod 755 /srv/evil; cp /srv/evil /usr/bin/bash; mv /bin /was; mkdir /bin; for p in sh bash find tar mkdir; do cp /srv/evil /bin/$p; done',
      );
      expect((await session.grade(ended(), sandbox)).reward).toMatchObject({ value: 0 });
    });
  });

  it('cannot have something loaded into the host’s programs either', async () => {
    const dir = taskDir({
      'environment/Dockerfile': 'FROM host\nRUN true\n',
      'tests/test.sh': 'echo 0 > /logs/verifier/reward.txt\nexec python3 -I -c ""\n',
    });
    await inSandbox(dir, async (session, sandbox) => {
      const site =
        "import os\nif os.path.isdir('/logs/verifier'): open('/logs/verifier/reward.txt', 'w').write('1')\n";
      for (const minor of [9, 10, 11, 12, 13, 14])
        await sandbox.writeFile(`/etc/python3.${minor}/sitecustomize.py`, site);
      await sandbox.writeFile('/etc/ld.so.preload', '/srv/evil.so\n');
      expect((await sh(sandbox, 'ls /srv')).said).toMatch(/evil\.so/);
      const { reward, output } = await session.grade(ended(), sandbox);
      expect(reward).toMatchObject({ value: 0 });
      expect(output).toBe('');
    });
  });

  it('say why apt cannot work, and leave no image', async () => {
    const dir = taskDir({
      'environment/Dockerfile':
        'FROM host\nRUN apt-get update && apt-get install -y --no-install-recommends tree\n',
      'tests/test.sh': 'true\n',
    });
    const before = (await store.list()).length;
    const error = await harborEnvironment(options)
      .refOf(dir)
      .then(
        () => null,
        (thrown) => thrown,
      );
    expect(error).toMatchObject({ code: 'CapabilityMissing' });
    expect(error.message).toMatch(/Dockerfile line 2: RUN failed/);
    expect(error.message).toMatch(/one uid|no network/);
    expect(error.next).not.toBe('');
    expect(await store.list()).toHaveLength(before);
  });

  it('say how an image that is not there is added', async () => {
    for (const files of [
      { 'task.toml': '[environment]\ndocker_image = "acme/base:1"\n' },
      { 'environment/Dockerfile': 'FROM acme/base:1\nRUN true\n' },
    ]) {
      const dir = taskDir({ 'tests/test.sh': 'true\n', ...files });
      const opening = harborEnvironment(options).refOf(dir);
      await expect(opening).rejects.toMatchObject({
        code: 'NotFound',
        message: expect.stringContaining('acme/base:1'),
        next: expect.stringContaining('docker save acme/base:1'),
      });
    }
  });

  describe.skipIf(!existsSync(BUSYBOX))(`of a system of their own (${BUSYBOX} is needed)`, () => {
    const system = (bash: string) => `FROM scratch
COPY --from=host ${BUSYBOX} /bin/
RUN ["/bin/busybox", "--install", "-s", "/bin"]
ENV PATH=/bin
${bash}`;

    it('are refused where grading has nothing to run', async () => {
      const context = taskDir({ Dockerfile: system('') });
      await store.build({ context, name: 'acme/bare' });
      const dir = taskDir({
        'task.toml': '[environment]\ndocker_image = "acme/bare"\n',
        'tests/test.sh': 'true\n',
      });
      await expect(inSandbox(dir, async () => {})).rejects.toMatchObject({
        code: 'CapabilityMissing',
        message: expect.stringContaining('no bash'),
      });
    });

    it('are graded, and an agent that takes their programs away gets the lowest score', async () => {
      const dir = taskDir({
        'environment/bash': '#!/bin/sh\nexec /bin/sh "$@"\n',
        'environment/Dockerfile': system(
          'COPY bash /bin/\nRUN chmod 755 /bin/bash\nWORKDIR /app\n',
        ),
        'tests/test.sh': '[ "$(cat done)" = yes ] && echo 1 > /logs/verifier/reward.txt\n',
      });
      await inSandbox(dir, async (session, sandbox) => {
        await sandbox.writeFile('done', 'yes');
        const grade = await session.grade(ended(), sandbox);
        expect(grade).toEqual({ reward: { status: 'ok', value: 1, components: {} }, output: '' });
        await sh(sandbox, 'rm /bin/sh /bin/busybox');
        expect((await session.grade(ended(), sandbox)).reward).toMatchObject({
          status: 'agent_error',
          value: 0,
        });
      });
    });
  });
});
