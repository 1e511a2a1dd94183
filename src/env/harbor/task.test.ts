import {
  chmodSync,
  cpSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  rmSync,
  symlinkSync,
  truncateSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import { LonghaulError } from '../../core/index.ts';
import { harborEnvironment } from './environment.ts';
import { type BuildRequest, type LoadOptions, loadHarborTask, type TaskImage } from './task.ts';

const made: string[] = [];
afterEach(() => {
  for (const dir of made.splice(0)) rmSync(dir, { recursive: true, force: true });
});

/** A valid task with the given files changed, added, or (null) left out. */
function taskDir(files: Record<string, string | null> = {}): string {
  const dir = mkdtempSync(join(tmpdir(), 'harbor-'));
  made.push(dir);
  const all = {
    'instruction.md': 'Say hello in /workspace/hello.txt.\n',
    'task.toml': 'schema_version = "1.1"\n',
    'tests/test.sh': 'echo 1 > /logs/verifier/reward.txt\n',
    ...files,
  };
  for (const [name, text] of Object.entries(all)) {
    if (text === null) continue;
    mkdirSync(dirname(join(dir, name)), { recursive: true });
    writeFileSync(join(dir, name), text);
  }
  return dir;
}

async function refusal(dir: string, options: LoadOptions = {}): Promise<LonghaulError> {
  try {
    await loadHarborTask(dir, options);
  } catch (thrown) {
    expect(thrown).toBeInstanceOf(LonghaulError);
    return thrown as LonghaulError;
  }
  throw new Error('the task was accepted');
}

/** What needs no build. */
const copies = { 'environment/Dockerfile': 'FROM x\nCOPY a /workspace/\n', 'environment/a': '' };

const IMAGE: TaskImage = { image: 'rootfs:sha256:1', workdir: '/srv', notes: [] };

const FULL = `
schema_version = "1.1"
artifacts = []

[task]
name = "acme/hello"
description = "Says hello"
authors = [{ name = "A", email = "a@example.com" }]
keywords = ["x"]

[metadata]
category = "greetings"
difficulty = "easy"
anything = { goes = [1, 2] }
released = 2026-01-02
split = "heldout"
reward_range = [-1, 2]

[verifier]
timeout_sec = 120.5
env = { LEVEL = "\${LEVEL:-3}", TOKEN = "a-\${TOKEN}-b" }
network_mode = "no-network"
user = "root"

[agent]
timeout_sec = 30

[environment]
build_timeout_sec = 600.0
cpus = 2
memory_mb = 1024
storage_mb = 64
gpus = 0
allow_internet = false
mcp_servers = []

[solution]
env = { A = "b" }
`;

describe('loadHarborTask', () => {
  it('reads every common key', async () => {
    const dir = taskDir({ 'task.toml': FULL, 'solution/solve.sh': 'true\n' });
    const task = await loadHarborTask(dir, { allowEnv: { TOKEN: 'secret' } });
    expect(task).toMatchObject({
      name: 'acme/hello',
      domain: 'greetings',
      split: 'heldout',
      difficulty: 'easy',
      instruction: 'Say hello in /workspace/hello.txt.',
      workdir: '/workspace',
      verifier: { timeoutMs: 120_500, env: { LEVEL: '3', TOKEN: 'a-secret-b' } },
      agentTimeoutMs: 30_000,
      rewardRange: [-1, 2],
      sandbox: { cpus: 2, memoryBytes: 1 << 30, diskBytes: 64 << 20, network: 'none' },
      solutionEnv: { A: 'b' },
    });
    expect(task.notes).toEqual([`${dir}/task.toml: verifier.user: not used`]);
  });

  it('fills in what a minimal task leaves out', async () => {
    const task = await loadHarborTask(taskDir());
    expect(task).toMatchObject({
      domain: 'harbor',
      verifier: { timeoutMs: 600_000, env: {} },
      agentTimeoutMs: null,
      rewardRange: [0, 1],
      workspace: [],
      solution: null,
      notes: [],
    });
    expect(task.sandbox).toEqual({ network: 'none' });
  });

  it('reads the deprecated forms', async () => {
    const task = await loadHarborTask(
      taskDir({
        'task.toml': 'version = "1.0"\n[environment]\nmemory = "4G"\nstorage = "512MB"\n',
      }),
    );
    expect(task.sandbox).toMatchObject({ memoryBytes: 4 * 2 ** 30, diskBytes: 512 * 2 ** 20 });
  });

  it('reports unknown keys and goes on', async () => {
    const dir = taskDir({
      'task.toml': '[agent]\ntimeout_sec = 5\nmood = "good"\n[[agent.x]]\na = 1\n[extra]\nb = 2\n',
    });
    const task = await loadHarborTask(dir);
    expect(task.agentTimeoutMs).toBe(5000);
    expect(task.notes.map((note) => note.split(': ')[1]).sort()).toEqual([
      'agent.mood',
      'agent.x',
      'extra',
    ]);
  });

  const toml = (text: string) => ({ 'task.toml': text });
  it.each<[string, Record<string, string | null>, string[]]>([
    ['missing instruction', { 'instruction.md': null }, ['instruction.md', 'missing']],
    ['empty instruction', { 'instruction.md': ' \n\t\n' }, ['instruction.md', 'empty']],
    ['missing task.toml', { 'task.toml': null }, ['task.toml', 'missing']],
    ['broken TOML', toml('a = 1\n[agent\n'), ['task.toml', 'line 2']],
    ['duplicate key', toml('version = "1.0"\nversion = "1.0"\n'), ['task.toml', 'line 2']],
    [
      'wrong type',
      toml('[agent]\ntimeout_sec = "soon"'),
      ['agent.timeout_sec', 'number', '"soon"'],
    ],
    [
      'negative timeout',
      toml('[verifier]\ntimeout_sec = -5'),
      ['verifier.timeout_sec', '>0', '-5'],
    ],
    ['zero timeout', toml('[agent]\ntimeout_sec = 0'), ['agent.timeout_sec', '>0']],
    ['endless timeout', toml('[agent]\ntimeout_sec = inf'), ['agent.timeout_sec']],
    [
      'a timeout of a year',
      toml('[agent]\ntimeout_sec = 31536000'),
      ['agent.timeout_sec', '86400'],
    ],
    ['negative memory', toml('[environment]\nmemory_mb = -1'), ['environment.memory_mb']],
    ['bad size', toml('[environment]\nmemory = "lots"'), ['environment.memory', '4G']],
    ['section of the wrong type', toml('agent = 3'), ['agent', 'object', '3']],
    [
      'two wrong keys',
      toml('[agent]\ntimeout_sec = -1\n[task]\nname = 2'),
      ['agent.t', 'task.name'],
    ],
    ['wrong and unknown', toml('x = 1\n[agent]\ntimeout_sec = -1'), ['agent.timeout_sec']],
    ['future format', toml('schema_version = "2.0"'), ['schema_version', 'version 1']],
    ['future old format', toml('version = "2.0"'), ['version', 'version 1']],
    ['empty reward range', toml('[metadata]\nreward_range = [1, 1]'), ['metadata.reward_range']],
    ['missing test.sh', { 'tests/test.sh': null }, ['tests/test.sh', 'grades']],
    ['solution without script', { 'solution/x': '' }, ['solution/solve.sh']],
    ['secret asked for', toml(`[verifier]\nenv = { A = "\${HOME}" }`), ['verifier.env.A', 'HOME']],
    [
      'Dockerfile without FROM',
      { 'environment/Dockerfile': 'WORKDIR /workspace' },
      ['line 1', 'FROM'],
    ],
    [
      'COPY of nothing',
      { 'environment/Dockerfile': 'FROM x\nCOPY gone /workspace/' },
      ['Dockerfile', 'COPY gone', 'no such file'],
    ],
    [
      'COPY from outside',
      { 'environment/Dockerfile': 'FROM x\nCOPY ../solution /workspace/' },
      ['Dockerfile', 'line 2', 'leads out'],
    ],
  ])('TaskInvalid: %s', async (_, files, expected) => {
    const error = await refusal(taskDir(files));
    expect(error.code).toBe('TaskInvalid');
    for (const part of expected) expect(error.message).toContain(part);
    expect(error.next).toContain('docs/tasks.md');
  });

  it.each<[string, Record<string, string>, string]>([
    ['network', toml('[environment]\nallow_internet = true'), 'environment.allow_internet'],
    ['allow-list', toml('[agent]\nnetwork_mode = "allowlist"'), 'agent.network_mode'],
    ['GPU', toml('[environment]\ngpus = 1'), 'environment.gpus'],
    ['image', toml('[environment]\ndocker_image = "x:1"'), 'environment.docker_image'],
    ['MCP', toml('[[environment.mcp_servers]]\nname = "x"'), 'environment.mcp_servers'],
    ['healthcheck', toml('[environment.healthcheck]\ncommand = "true"'), 'environment.healthcheck'],
    ['collect', toml('[[verifier.collect]]\ncommand = "x"'), 'verifier.collect'],
    [
      'separate verifier',
      toml('[verifier]\nenvironment_mode = "separate"'),
      'verifier.environment',
    ],
    ['compose', { 'environment/docker-compose.yaml': 'x' }, 'docker-compose.yaml'],
    ['RUN', { 'environment/Dockerfile': 'FROM x\n\n# y\nRUN apt-get \\\n  install y\n' }, 'line 4'],
    ['/app', { 'environment/Dockerfile': 'FROM x\nWORKDIR /app\n' }, 'line 2'],
    ['stages', { 'environment/Dockerfile': 'FROM x AS a\nFROM y\n' }, 'line 2'],
    ['ARG before FROM', { 'environment/Dockerfile': 'ARG A=1\nFROM x\n' }, 'line 1'],
    ['.dockerignore', { ...copies, 'environment/.dockerignore': 'a' }, '.dockerignore'],
  ])('CapabilityMissing: %s', async (_, files, where) => {
    const error = await refusal(taskDir(files));
    expect(error.code).toBe('CapabilityMissing');
    expect(error.message).toContain(where);
    expect(error.next).not.toBe('');
  });

  it('names a directory that is missing or none', async () => {
    const dir = taskDir();
    expect((await refusal(join(dir, 'gone'))).message).toContain(join(dir, 'gone'));
    expect((await refusal(join(dir, 'task.toml'))).message).toContain('expected a directory');
  });

  it('refuses links that lead outside, wherever they lie', async () => {
    for (const [link, target] of [
      ['environment/passwd', '/etc/passwd'],
      ['environment/a', '../instruction.md'],
      ['environment/b', '../solution'],
      ['tests/c', '../../../../etc'],
      ['environment/dangling', 'nothing'],
    ] as const) {
      const dir = taskDir({ 'environment/x': '', 'solution/solve.sh': '' });
      symlinkSync(target, join(dir, link));
      const error = await refusal(dir);
      expect(error.code).toBe('TaskInvalid');
      expect(error.message).toContain(`${join(dir, link)}: symlink to ${target}`);
    }
    for (const whole of ['environment', 'tests', 'instruction.md', 'task.toml']) {
      const dir = taskDir();
      rmSync(join(dir, whole), { recursive: true, force: true });
      symlinkSync(
        whole === 'tests' || whole === 'environment' ? '/etc' : '/etc/passwd',
        join(dir, whole),
      );
      expect((await refusal(dir)).message).toContain(join(dir, whole));
    }
  });

  it('keeps links that stay inside', async () => {
    const dir = taskDir({ 'environment/d/x': 'x' });
    symlinkSync('d/x', join(dir, 'environment/l'));
    const task = await loadHarborTask(dir);
    expect(task.workspace.map((item) => item.path)).toEqual(['d', 'd/x', 'l']);
  });

  it('refuses what is too large, too many or text it cannot read', async () => {
    const big = taskDir({ 'environment/big': '' });
    truncateSync(join(big, 'environment/big'), 17 * 2 ** 20);
    expect((await refusal(big)).message).toMatch(/big: too large: 17825792 bytes/);
    const many = taskDir();
    mkdirSync(join(many, 'environment'));
    for (let i = 0; i <= 5000; i++) writeFileSync(join(many, 'environment', `f${i}`), '');
    expect((await refusal(many)).message).toContain('more than 5000 files');
    const binary = taskDir();
    writeFileSync(join(binary, 'instruction.md'), Buffer.from([0x48, 0xff, 0xfe]));
    expect((await refusal(binary)).message).toContain('UTF-8');
  });

  it('maps COPY as Docker does', async () => {
    const dir = taskDir({
      'environment/Dockerfile': [
        '# syntax=docker/dockerfile:1',
        'FROM python:3.11-slim',
        'LABEL a=b',
        'WORKDIR /workspace',
        'WORKDIR sub',
        'COPY files/ /workspace/',
        'COPY one.txt \\',
        '     renamed.txt',
        'COPY ["one.txt", "two.txt", "./"]',
        'CMD ["bash"]',
      ].join('\n'),
      'environment/files/a/b': '',
      'environment/files/c': '',
      'environment/one.txt': '',
      'environment/two.txt': '',
    });
    const task = await loadHarborTask(dir);
    expect(task.workdir).toBe('/workspace/sub');
    expect(task.workspace.map((item) => item.path).sort()).toEqual(
      ['a', 'a/b', 'c', 'sub/one.txt', 'sub/renamed.txt', 'sub/two.txt'].sort(),
    );
    expect(task.notes.some((note) => note.includes('FROM python:3.11-slim is replaced'))).toBe(
      true,
    );
  });

  it('hashes the bundle: the same wherever and whenever, another with any change', async () => {
    const dir = taskDir({ 'environment/a': '1', 'environment/b/c': '2', 'solution/solve.sh': '' });
    const { hash } = await loadHarborTask(dir);
    const copy = mkdtempSync(join(tmpdir(), 'harbor-'));
    made.push(copy);
    // Written in another order, at another time.
    for (const part of [
      'solution',
      'tests',
      'task.toml',
      'environment/b',
      'environment/a',
      'instruction.md',
    ])
      cpSync(join(dir, part), join(copy, part), { recursive: true });
    utimesSync(join(copy, 'environment/a'), 1, 1);
    mkdirSync(join(copy, 'tests/__pycache__'));
    writeFileSync(join(copy, 'README.md'), 'not part of the task');
    expect((await loadHarborTask(copy)).hash).toBe(hash);

    const changed = new Set([hash]);
    const edits = [
      () => writeFileSync(join(copy, 'environment/a'), '2'),
      () => writeFileSync(join(copy, 'environment/d'), ''),
      () => chmodSync(join(copy, 'tests/test.sh'), 0o755),
      () => symlinkSync('a', join(copy, 'environment/l')),
      () => writeFileSync(join(copy, 'solution/solve.sh'), '#'),
      () => writeFileSync(join(copy, 'instruction.md'), 'Do.'),
    ];
    for (const edit of edits) {
      edit();
      changed.add((await loadHarborTask(copy)).hash);
    }
    expect(changed.size).toBe(edits.length + 1);
  });
});

describe('images of tasks', () => {
  const run = { 'environment/Dockerfile': 'FROM host\nWORKDIR /srv\nRUN true\n' };
  const building = (asked: BuildRequest[] = []): LoadOptions => ({
    async buildImage(request) {
      asked.push(request);
      return { ...IMAGE, notes: ['line 3: a note'] };
    },
  });

  it('are built where the Dockerfile needs it, and only there', async () => {
    const asked: BuildRequest[] = [];
    const dir = taskDir({ ...run, 'task.toml': '[environment]\nbuild_timeout_sec = 5\n' });
    const task = await loadHarborTask(dir, building(asked));
    expect(asked).toEqual([
      {
        context: join(task.dir, 'environment'),
        dockerfile: 'Dockerfile',
        runTimeoutMs: 5000,
        allow: [],
      },
    ]);
    expect(task).toMatchObject({ ownRoot: true, workdir: '/srv', workspace: [] });
    expect(task.sandbox).toEqual({ image: 'rootfs:sha256:1', network: 'none' });
    expect(task.notes).toEqual(['line 3: a note']);

    const plain = await loadHarborTask(taskDir(copies), building(asked));
    expect(asked).toHaveLength(1);
    expect(plain).toMatchObject({ ownRoot: false, workdir: '/workspace' });
  });

  it('pass on why a build failed, and build nothing of what is no Dockerfile', async () => {
    const failed = new LonghaulError('ConfigInvalid', 'Dockerfile line 3: RUN failed');
    const options = { buildImage: () => Promise.reject(failed) };
    expect(await refusal(taskDir(run), options)).toBe(failed);
    const broken = taskDir({ 'environment/Dockerfile': 'FROM host\nFORM x\nRUN true\n' });
    expect((await refusal(broken, options)).message).toMatch(/unknown instruction FORM/);
  });

  it('are looked up by the name in docker_image where there is no Dockerfile', async () => {
    const named = { 'task.toml': '[environment]\ndocker_image = "acme/base:1"\n' };
    const asked: string[] = [];
    const options: LoadOptions = {
      async resolveImage(name) {
        asked.push(name);
        return IMAGE;
      },
    };
    const task = await loadHarborTask(taskDir({ ...named, 'environment/x': '' }), options);
    expect(asked).toEqual(['acme/base:1']);
    expect(task).toMatchObject({ ownRoot: true, workspace: [], notes: [] });
  });

  it('decide the hash of the task', async () => {
    const dir = taskDir(run);
    const { hash } = await loadHarborTask(dir, building());
    expect((await loadHarborTask(dir, building())).hash).toBe(hash);
    const buildImage = async () => ({ ...IMAGE, image: 'rootfs:sha256:2' as const });
    expect((await loadHarborTask(dir, { buildImage })).hash).not.toBe(hash);
  });

  it('say themselves where commands start', async () => {
    const at = (workdir: string) =>
      taskDir({ ...run, 'task.toml': `[environment]\nworkdir = "${workdir}"\n` });
    expect((await loadHarborTask(at('/srv/'), building())).workdir).toBe('/srv');
    const error = await refusal(at('/app'), building());
    expect(error.message).toMatch(/environment.workdir: .*\/srv, not in \/app/);
    expect(error.next).toMatch(/WORKDIR \/app/);
  });

  it('tell the agent where it starts', async () => {
    const environment = harborEnvironment(building());
    const session = await environment.open(await environment.refOf(taskDir(run)));
    expect(session.messages[0]!.content).toMatch(/working directory is \/srv.*There is no network/);
  });
});

describe('the network of a task', () => {
  const allow = [{ host: 'example.org' }];
  const asking = '[environment]\nallow_internet = true\n';

  it.each([
    asking,
    '[environment]\nnetwork_mode = "public"\n',
    '[verifier]\nallowed_hosts = ["example.org"]\n',
  ])('is refused without the user’s word, and what they allow with it: %s', async (text) => {
    const dir = taskDir({ 'task.toml': text });
    const error = await refusal(dir);
    expect(error.code).toBe('CapabilityMissing');
    expect(error.next).toMatch(/--allow HOST/);
    const task = await loadHarborTask(dir, { allow });
    expect(task.sandbox.network).toEqual({ allow });
  });

  it.each(['[environment]\nallow_internet = false\n', '[verifier]\nnetwork_mode = "no-network"\n'])(
    'is not forced on a task that says it has none: %s',
    async (text) => {
      const error = await refusal(taskDir({ 'task.toml': text }), { allow });
      expect(error.code).toBe('ConfigInvalid');
      expect(error.next).toMatch(/--allow/);
    },
  );

  it('is what the reference says, so that a resumed run has the same', async () => {
    const environment = harborEnvironment();
    const dir = taskDir({ 'task.toml': asking });
    const ref = { environment: 'harbor', id: dir, domain: 'x', split: 'train' as const, allow };
    const session = await environment.open(JSON.parse(JSON.stringify(ref)));
    expect(session.sandbox.network).toEqual({ allow });
    expect(session.messages[0]!.content).toMatch(/network through a proxy/);
    await expect(environment.open({ ...ref, allow: [] })).rejects.toMatchObject({
      code: 'CapabilityMissing',
    });
  });

  it('notes hosts that the task names and nobody allowed', async () => {
    const text = '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org", "example.org"]\n';
    const dir = taskDir({ 'task.toml': text });
    const task = await loadHarborTask(dir, { allow });
    expect(task.notes).toEqual([expect.stringMatching(/a\.org is not allowed/)]);
  });
});

describe('harborEnvironment', () => {
  it('lists tasks by split, in an order fixed by the seed', () => {
    const root = mkdtempSync(join(tmpdir(), 'harbor-root-'));
    made.push(root);
    for (let i = 0; i < 40; i++) cpSync(taskDir(), join(root, `t${i}`), { recursive: true });
    mkdirSync(join(root, 'not-a-task'));
    const environment = harborEnvironment({ root });
    const train = environment.tasks('train', 1, 100);
    const heldout = environment.tasks('heldout', 1, 100);
    expect(train.length + heldout.length).toBe(40);
    expect(heldout.length).toBeGreaterThan(0);
    expect(new Set([...train, ...heldout].map((ref) => ref.id)).size).toBe(40);
    expect(environment.tasks('train', 1, 5)).toEqual(train.slice(0, 5));
    expect(environment.tasks('train', 2, 100)).not.toEqual(train);
  });

  it('opens every example without a note but the base image', async () => {
    const root = resolve(import.meta.dirname, '../../../recipes/tasks');
    const environment = harborEnvironment({ root, buildImage: async () => IMAGE });
    const refs = [...environment.tasks('train', 1, 9), ...environment.tasks('heldout', 1, 9)];
    expect(refs).toHaveLength(4);
    for (const ref of refs) {
      const { task } = await environment.open(ref);
      expect(task.notes).toEqual(
        task.ownRoot ? [] : [expect.stringContaining('FROM python:3.11-slim is replaced')],
      );
      expect(task.solution).not.toBeNull();
    }
  });

  it('refuses references that cannot be a task', async () => {
    const environment = harborEnvironment();
    const ref = { environment: 'harbor', domain: 'x', split: 'train' as const };
    await expect(environment.open({ ...ref, id: 'relative' })).rejects.toMatchObject({
      code: 'TaskInvalid',
    });
    await expect(environment.open({ ...ref, id: '/no/such/task' })).rejects.toMatchObject({
      code: 'TaskInvalid',
    });
    expect(() => environment.tasks('train', 1, 1)).toThrow(LonghaulError);
    expect(() => harborEnvironment({ root: '/no/such' }).tasks('train', 1, 1)).toThrow(/no\/such/);
  });

  it('tells the agent where its workspace is, and nothing of tests or solution', async () => {
    const dir = taskDir({ 'solution/solve.sh': 'SECRET' });
    const environment = harborEnvironment();
    const session = await environment.open(await environment.refOf(dir));
    expect(session.messages).toHaveLength(1);
    const text = session.messages[0]?.content ?? '';
    expect(text).toContain(readFileSync(join(dir, 'instruction.md'), 'utf8').trim());
    expect(text).toContain('/workspace');
    expect(text).not.toContain('SECRET');
  });
});
