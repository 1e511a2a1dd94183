import {
  chmodSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { apply, type NewEvent, type Reward, type RunState } from '../../core/index.ts';
import type { Sandbox, SandboxDriver } from '../../sandbox/contract.ts';
import { openSandboxes, probeBubblewrap } from '../../sandbox/index.ts';
import { type HarborSession, harborEnvironment } from './environment.ts';
import { runSolution } from './solution.ts';

const EXAMPLES = resolve(import.meta.dirname, '../../../recipes/tasks');
const START = Date.parse('2026-01-01T00:00:00Z');

/** State of a run after the given events, one second apart. */
function stateAfter(budget: RunState['spec']['budget'], ...events: NewEvent[]): RunState {
  const created: NewEvent = {
    type: 'run.created',
    data: {
      kind: 'rollout',
      task: { name: 'harbor', ref: 'x' },
      agent: 'coder',
      model: { ref: 'test/model' },
      seed: 1,
      budget,
    },
  };
  let state: RunState | null = null;
  [created, ...events].forEach((event, i) => {
    const at = new Date(START + i * 1000).toISOString();
    state = apply(state, { ...event, runId: '01ARZ3NDEKTSV4RRFFQ69G5FAV', seq: i + 1, at, v: 1 });
  });
  return state as unknown as RunState;
}

const DONE: NewEvent = {
  type: 'message.added',
  data: { message: { role: 'assistant', content: 'Done.' } },
};
const CALL: NewEvent = {
  type: 'message.added',
  data: {
    message: {
      role: 'assistant',
      content: '',
      toolCalls: [{ callId: 'c', tool: 'shell', input: {} }],
    },
  },
};
const ASK = (step: number): NewEvent => ({
  type: 'model.requested',
  data: { callId: `m${step}`, model: 'm', step, attempt: 1 },
});
const ended = stateAfter({}, DONE);

const probeDir = mkdtempSync(join(tmpdir(), 'harbor-probe-'));
const probe = await probeBubblewrap({ dir: probeDir });
rmSync(probeDir, { recursive: true, force: true });
const lacking = probe.ok ? '' : ` (skipped: ${probe.reason})`;

describe.skipIf(!probe.ok)(`grading in a sandbox${lacking}`, () => {
  let driver: SandboxDriver;
  let root: string;
  let count = 0;
  beforeAll(async () => {
    root = mkdtempSync(join(tmpdir(), 'harbor-grade-'));
    ({ driver } = await openSandboxes({ dir: join(root, 'sandboxes'), prefer: 'bubblewrap' }));
  });
  afterAll(async () => {
    await driver?.close();
    rmSync(root, { recursive: true, force: true });
  });

  function taskDir(testSh: string, files: Record<string, string> = {}): string {
    const dir = join(root, `task-${count++}`);
    const all = {
      'instruction.md': 'Do it.',
      'task.toml': '[verifier]\ntimeout_sec = 30\n',
      'tests/test.sh': testSh,
      ...files,
    };
    for (const [name, text] of Object.entries(all)) {
      mkdirSync(dirname(join(dir, name)), { recursive: true });
      writeFileSync(join(dir, name), text);
    }
    return dir;
  }

  /** Opens a task in a fresh sandbox, lets `work` act in the agent's place, and hands both over. */
  async function inSandbox<T>(
    dir: string,
    body: (session: HarborSession, sandbox: Sandbox) => Promise<T>,
  ): Promise<T> {
    const environment = harborEnvironment();
    const session = await environment.open(await environment.refOf(dir));
    const sandbox = await driver.create(session.sandbox);
    try {
      await session.prepare(sandbox);
      return await body(session, sandbox);
    } finally {
      await sandbox.stop();
    }
  }

  const sh = (sandbox: Sandbox, script: string) => sandbox.exec({ argv: ['bash', '-c', script] });

  /** Grades after the agent ran `script`. */
  const gradeAfter = (dir: string, script = 'true', state = ended) =>
    inSandbox(dir, async (session, sandbox) => {
      const result = await sh(sandbox, script);
      expect({ code: result.code, stderr: result.stderr }).toEqual({ code: 0, stderr: '' });
      return session.grade(state, sandbox);
    });

  const ungraded = (reason: string): Reward =>
    ({
      status: 'grader_error',
      value: null,
      components: {},
      reason: expect.stringContaining(reason),
    }) as Reward;

  it.each(['fix-python-package', 'wrangle-logs', 'fraction-calculator'])(
    '%s: the solution scores 1, doing nothing 0',
    async (name) => {
      await inSandbox(join(EXAMPLES, name), async (session, sandbox) => {
        const idle = await session.grade(ended, sandbox);
        expect(idle.reward).toMatchObject({ status: 'ok', value: 0 });
        const solved = await runSolution(session.task, sandbox);
        expect({ code: solved.code, stderr: solved.stderr }).toMatchObject({ code: 0 });
        const grade = await session.grade(ended, sandbox);
        expect(grade.reward).toMatchObject({ status: 'ok', value: 1 });
        expect(Object.keys(grade.reward.components).length).toBeGreaterThan(2);
      });
    },
  );

  it('gives partial work a part of the score', async () => {
    const half = await gradeAfter(
      join(EXAMPLES, 'fix-python-package'),
      `sed -i 's/(blocks\\[-1\\]\\[0\\], end)/(blocks[-1][0], max(blocks[-1][1], end))/' slotbook/schedule.py`,
    );
    expect(half.reward).toMatchObject({ value: 0.5, components: { nested: 1, midnight: 0 } });
    // Right at the first defect, and something else broken.
    const broken = await gradeAfter(
      join(EXAMPLES, 'fix-python-package'),
      `sed -i 's/(blocks\\[-1\\]\\[0\\], end)/(blocks[-1][0], max(blocks[-1][1], end))/' slotbook/schedule.py
       sed -i 's/minute > 59/minute > 58/' slotbook/times.py`,
    );
    expect(broken.reward).toMatchObject({ value: 0 });
    const constant = await gradeAfter(
      join(EXAMPLES, 'fraction-calculator'),
      `printf '#!/bin/sh\\necho 1\\n' > calc; chmod +x calc`,
    );
    expect(constant.reward).toMatchObject({ value: 0 });
  });

  it('an example grader is not fooled by the work it runs', async () => {
    const dir = join(EXAMPLES, 'fraction-calculator');
    const calc = (body: string) =>
      gradeAfter(dir, `cat > calc <<'END'\n#!/bin/bash\n${body}\nEND\nchmod +x calc`);
    // Leaves a process behind that keeps writing a reward.
    const daemon = await calc(
      `setsid bash -c 'while :; do echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &`,
    );
    expect(daemon.reward).toMatchObject({ status: 'ok', value: 0 });
    // Takes the verifier down, with a reward of its own in place: costs the score.
    for (const sabotage of [
      'kill -9 $PPID',
      `echo '{"reward": 1}' > /logs/verifier/reward.json; kill -9 $PPID`,
      'rm -r $(readlink -m /logs)',
      'chmod 0 /tmp',
      'mkdir /logs/verifier/reward.json.new',
      `python3 -c "for i in range(10**6): open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"`,
    ]) {
      const { reward } = await calc(sabotage);
      expect({ sabotage, value: reward.value }).toEqual({ sabotage, value: 0 });
    }
  });

  it('the harness of the examples hides tests and memory from the work', async () => {
    const harness = readFileSync(join(EXAMPLES, 'wrangle-logs/tests/harness.py'), 'utf8');
    const verify = (hide: string) => `import sys
sys.path.insert(0, "/tests")
from harness import finish, run, take_over
${hide}
print(run(["/workspace/spy"])[1])
finish(reward=0)
`;
    const spy = `cat > spy <<'END'
#!/usr/bin/env python3
import os
for path in ("/tests/verify.py", "/proc/%d/mem" % os.getppid(), "/proc/%d/environ" % os.getppid()):
    try:
        os.open(path, os.O_RDONLY)
        print("opened", path)
    except OSError:
        pass
END
chmod +x spy`;
    const opened = async (hide: string) => {
      const tests = { 'tests/harness.py': harness, 'tests/verify.py': verify(hide) };
      const { reward, output } = await gradeAfter(
        taskDir('exec python3 -I /tests/verify.py', tests),
        spy,
      );
      expect(reward).toMatchObject({ status: 'ok', value: 0 });
      return output?.match(/^opened/gm)?.length ?? 0;
    };
    expect(await opened('')).toBe(3);
    expect(await opened('take_over()')).toBe(0);
  });

  it('shows neither tests nor solution to the agent', async () => {
    const dir = taskDir('# MARK-TESTS\n', {
      'solution/solve.sh': '# MARK-SOLUTION\n',
      'environment/files/a': 'MARK-FILE',
      'environment/Dockerfile': 'FROM x\nWORKDIR /workspace\nCOPY files/ ./\n',
    });
    await inSandbox(dir, async (session, sandbox) => {
      const find = `grep -rIls "MARK-[A-Z]*" / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr 2>/dev/null; find /tests /solution /logs -type f 2>/dev/null; true`;
      expect((await sh(sandbox, find)).stdout.trim()).toBe('/workspace/a');
      await session.grade(ended, sandbox);
      expect((await sh(sandbox, find)).stdout.trim()).toBe('/workspace/a');
    });
  });

  it('ignores what the agent planted', async () => {
    const dir = taskDir(
      'ls -A /tests "$HOME"; grep -qsx done result && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt; sleep 0.2',
    );
    const plant = `
      mkdir -p bin .local/lib $(readlink -m /tests /logs/verifier) /tmp/verifier-home
      printf '#!/bin/sh\nexit 0\n' | tee bin/grep bin/bash bin/python3 > /dev/null
      chmod +x bin/*
      echo 'echo 1 > /logs/verifier/reward.txt' | tee .bashrc .profile sitecustomize.py conftest.py /tests/test.sh /tests/planted /tmp/verifier-home/.bashrc > /dev/null
      echo '{"reward": 1}' > /logs/verifier/reward.json
      setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' > /dev/null 2>&1 < /dev/null &
      sleep 0.3; cat /logs/verifier/reward.txt; ls /tests`;
    await inSandbox(dir, async (session, sandbox) => {
      expect((await sh(sandbox, plant)).stdout).toBe('1\nplanted\ntest.sh\n');
      const grade = await session.grade(ended, sandbox);
      expect(grade).toEqual({
        reward: { status: 'ok', value: 0, components: {} },
        output: '/tests:\ntest.sh\n\n/tmp/verifier-home:\n',
      });
    });
  });

  it('counts a verifier killed by the memory limit as the doing of the work', async (context) => {
    if (driver.capabilities.memory !== 'cgroup')
      return context.skip('memory is not limited by a control group on this machine');
    const dir = taskDir('exec python3 -c "x = bytearray(1 << 30)"', {
      'task.toml': '[environment]\nmemory_mb = 128\n',
    });
    const { reward } = await gradeAfter(dir);
    expect(reward).toEqual({ status: 'agent_error', value: 0, components: {} });
  });

  it('grades the workspace as the agent left it, a process of its still writing', async () => {
    const dir = taskDir(
      'pgrep -f marker-process >/dev/null && exit 9; test -f before -a -f after && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt',
    );
    const grade = await gradeAfter(
      dir,
      'touch before; setsid bash -c "exec -a marker-process sleep 1000" > /dev/null 2>&1 < /dev/null & touch after',
    );
    expect(grade.reward).toMatchObject({ status: 'ok', value: 1 });
  });

  it('uses no byte code of the agent, not even of the kind that ignores its source', async () => {
    const dir = taskDir(
      'printf "score = 0\\n" > module.py; python3 -c "import module; print(module.score)" > /logs/verifier/reward.txt',
    );
    const grade = await gradeAfter(
      dir,
      `printf 'score = 1\\n' > module.py
       python3 -c 'import py_compile; py_compile.compile("module.py", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)'
       printf 'score = 0\\n' > module.py
       test "$(python3 -c 'import module; print(module.score)')" = 1`,
    );
    expect(grade.reward).toMatchObject({ status: 'ok', value: 0 });
  });

  it('grades an agent that took away its own directory', async () => {
    const dir = taskDir('echo 0 > /logs/verifier/reward.txt; pwd', {
      'environment/Dockerfile': 'FROM x\nWORKDIR /workspace/inner\n',
    });
    for (const script of [
      'rm -r inner',
      'rm -r inner; echo > inner',
      'chmod 0 inner',
      'chmod 0 .',
    ]) {
      const grade = await gradeAfter(dir, script);
      expect(grade.reward).toMatchObject({ status: 'ok', value: 0 });
    }
  });

  it('leaves the workspace as it was: grading twice gives the same', async () => {
    const dir = taskDir(
      'ls > /logs/verifier/ls; touch seen; ls | wc -l | tr -d " " > /logs/verifier/n; echo "0.$(ls | wc -l)" > /logs/verifier/reward.txt',
    );
    await inSandbox(dir, async (session, sandbox) => {
      const first = await session.grade(ended, sandbox);
      expect(await session.grade(ended, sandbox)).toEqual(first);
      expect(await sandbox.listFiles('/workspace')).toEqual([]);
    });
  });

  it('gives the verifier an environment of its own', async () => {
    const dir = taskDir('env | sort; pwd; echo 1 > /logs/verifier/reward.txt', {
      'task.toml': `[verifier]\nenv = { LEVEL = "\${LEVEL:-3}" }\n`,
      'environment/Dockerfile': 'FROM x\nWORKDIR /workspace/deep/er\n',
    });
    const { reward, output } = await gradeAfter(dir);
    expect(reward).toMatchObject({ value: 1 });
    expect(output).toContain('LEVEL=3\n');
    expect(output).toContain('HOME=/tmp/verifier-home\n');
    expect(output).toMatch(/^PATH=\/usr\/local\/sbin:[a-z/:]*$/m);
    expect(output).toMatch(/\/workspace\/deep\/er\n$/);
    expect(output).not.toMatch(/^(USER|TMPDIR|BASH_ENV)=/m);
  });

  it.each([
    ['no reward file', 'echo looked; exit 1', 'no reward file (exit code 1)'],
    ['a missing program', 'exec no-such-program', 'not found'],
    ['not a number', 'echo nan > /logs/verifier/reward.txt', 'expected one number'],
    ['infinite', 'echo \'{"reward": 1e999}\' > /logs/verifier/reward.json', 'finite number'],
    ['out of range', 'echo 1.01 > /logs/verifier/reward.txt', 'outside of [0, 1]'],
    [
      'broken JSON beside a good text',
      'echo 1 > /logs/verifier/reward.txt; echo { > /logs/verifier/reward.json',
      'not valid JSON',
    ],
    ['a pipe', 'mkfifo /logs/verifier/reward.json', 'expected a file'],
    ['a link', 'ln -s /etc/hostname /logs/verifier/reward.txt', 'expected a file'],
    ['a huge file', 'head -c 100000 /dev/zero > /logs/verifier/reward.txt', 'too many'],
  ])('is ungraded: %s', async (_, script, reason) => {
    const grade = await gradeAfter(taskDir(script));
    expect(grade.reward).toEqual(ungraded(reason));
  });

  it('is ungraded when the verifier runs out of time, its output kept', async () => {
    const dir = taskDir('echo 1 > /logs/verifier/reward.txt; echo slow; sleep 1000', {
      'task.toml': '[verifier]\ntimeout_sec = 0.5\n',
    });
    const grade = await gradeAfter(dir);
    expect(grade.reward).toEqual(ungraded('within 0.5 s'));
    expect(grade.output).toBe('slow\n');
  });

  it('keeps the end of a long output', async () => {
    const grade = await gradeAfter(
      taskDir('seq 1 200000; echo the end; echo 1 > /logs/verifier/reward.txt'),
    );
    expect(grade.reward).toMatchObject({ value: 1 });
    expect(grade.output).toMatch(/the end\n$/);
    expect(grade.output?.length).toBeLessThan(20_000);
  });

  it('is ungraded when the task changed on disk meanwhile', async () => {
    const dir = taskDir('echo 1 > /logs/verifier/reward.txt');
    await inSandbox(dir, async (session, sandbox) => {
      writeFileSync(join(dir, 'tests/test.sh'), 'echo 0.5 > /logs/verifier/reward.txt');
      expect((await session.grade(ended, sandbox)).reward).toEqual(ungraded('changed since'));
    });
  });

  it('is an environment error when the sandbox is gone', async () => {
    await inSandbox(taskDir('echo 1 > /logs/verifier/reward.txt'), async (session, sandbox) => {
      await sandbox.stop();
      const { reward } = await session.grade(ended, sandbox);
      expect(reward).toMatchObject({ status: 'env_error', value: null });
    });
  });

  it('lets a full disk cost the agent nothing but the space', async () => {
    const dir = taskDir('test -s kept && echo 1 > /logs/verifier/reward.txt', {
      'task.toml': '[environment]\nstorage_mb = 16\n',
      'tests/big': 'x'.repeat(1 << 20),
    });
    const grade = await gradeAfter(
      dir,
      'echo kept > kept; head -c 100M /dev/zero > fill 2>/dev/null; true',
    );
    expect(grade.reward).toMatchObject({ status: 'ok', value: 1 });
  });

  it('says how the agent ended', async () => {
    const dir = taskDir('echo 1 > /logs/verifier/reward.txt');
    await inSandbox(dir, async (session, sandbox) => {
      const status = async (state: RunState) => (await session.grade(state, sandbox)).reward.status;
      expect(await status(stateAfter({ modelCalls: 2 }, ASK(1), CALL, ASK(2), CALL))).toBe(
        'truncated',
      );
      expect(await status(stateAfter({ modelCalls: 2 }, ASK(1), CALL, ASK(2), DONE))).toBe('ok');
      expect(await status(stateAfter({ wallMs: 2000 }, ASK(1), CALL))).toBe('agent_timeout');
      expect(await status(stateAfter({ wallMs: 60_000 }, ASK(1), CALL))).toBe('ok');
    });
  });

  it('copies hundreds of files with modes, links and long names', async () => {
    const files: Record<string, string> = {};
    for (let i = 0; i < 600; i++) files[`environment/files/d${i % 7}/f${i}`] = `content ${i}\n`;
    const long = `environment/files/${'long-directory-name/'.repeat(8)}${'ü'.repeat(60)}.txt`;
    files[long] = 'long';
    files['environment/files/run.sh'] = '#!/bin/sh\necho ran\n';
    files['environment/files/big'] = 'b'.repeat(10 << 20);
    files['environment/Dockerfile'] = 'FROM x\nCOPY files /workspace\n';
    const dir = taskDir('true', files);
    chmodSync(join(dir, 'environment/files/run.sh'), 0o755);
    chmodSync(join(dir, 'environment/files/d1/f1'), 0o640);
    mkdirSync(join(dir, 'environment/files/empty'));
    symlinkSync('run.sh', join(dir, 'environment/files/link'));
    await inSandbox(dir, async (_, sandbox) => {
      const seen = await sh(
        sandbox,
        './link; cat d3/f507; stat -c %a run.sh d1/f1; readlink link; ls -d empty; stat -c %s big; find . -type f | wc -l; find . -name "ü*" -exec cat {} +',
      );
      expect(seen.stdout).toBe(`ran\ncontent 507\n755\n640\nrun.sh\nempty\n${10 << 20}\n603\nlong`);
    });
  });
});
