import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Event, fold } from '../../src/core/index.ts';
import type { Reply } from '../chat-server/scenario.ts';
import type { Scenario } from '../chat-server/server.ts';
import { finished, heard, Stage, task } from './processes.ts';

const bubblewrap = spawnSync('bwrap', ['--version']).status === 0;
const TASK = task('stock-database');

const call = (name: string, args: Record<string, unknown>): Reply => ({
  toolCalls: [{ name, arguments: args }],
});

const script = readFileSync(join(TASK, 'solution', 'solve.sh'), 'utf8');
const program = /<<'PY'\n([\s\S]*)\nPY/.exec(script)![1]!;

/** Solves `stock-database`, looking where it is and leaving traces outside of its directory. */
const SOLVES: Scenario = {
  turns: [
    call('shell', { command: 'pwd; stockdb | head -1; echo seen >> /etc/visits' }),
    call('write_file', { path: 'report.py', content: program }),
    call('shell', { command: 'echo ran >> /etc/visits; python3 report.py && rm report.py' }),
    call('read_file', { path: 'report.csv', last_line: 1 }),
    call('shell', { command: 'echo checked >> /etc/visits; cat /etc/visits' }),
    { text: 'The report is there.' },
  ].map((reply) => ({ ...reply, delayMs: 15 })),
};

let stage: Stage;
beforeEach(() => {
  stage = new Stage();
});
afterEach(() => stage.close());

const eventsOf = async (id = 'last') =>
  ((await stage.run('show', id)).json as unknown as { events: Event[] }).events;
const outputsOf = (events: readonly Event[]) =>
  events.flatMap((event) => (event.type === 'tool.completed' ? [event.data.output] : []));

function taskDir(files: Record<string, string>): string {
  mkdirSync(stage.folder, { recursive: true });
  const dir = mkdtempSync(join(stage.folder, 'task-'));
  const all = { 'instruction.md': 'Do it.', 'task.toml': '', 'tests/test.sh': 'true\n', ...files };
  for (const [name, text] of Object.entries(all)) {
    mkdirSync(dirname(join(dir, name)), { recursive: true });
    writeFileSync(join(dir, name), text);
  }
  return dir;
}

describe.skipIf(!bubblewrap)('a task that needs an image (bubblewrap is needed)', () => {
  it('is built once and told, run, graded, and forked with the files of its whole root', async () => {
    await stage.vendor(SOLVES);
    const first = await stage.run('run', TASK, ...stage.model);
    expect(first.json).toMatchObject({ status: 'succeeded', reward: { value: 1, status: 'ok' } });
    expect(first.code).toBe(0);
    expect(first.stderr.match(/line 7: RUN/g)).toHaveLength(1);
    expect(first.stderr).not.toMatch(/\(cached\)/);
    const outputs = outputsOf(await eventsOf());
    // Shell and file tools mean the same directory.
    expect(outputs[0]).toMatch(/^\/srv\/shop\nCREATE TABLE items/);
    expect(outputs[3]).toBe('sku,stock,missing');
    expect(outputs[4]).toBe('seen\nran\nchecked\n');

    await stage.killVendor();
    await stage.vendor({
      turns: [
        ...SOLVES.turns.slice(0, 2),
        call('shell', { command: 'cat /etc/visits; ls' }),
        { text: 'looked' },
      ],
    });
    const fork = await stage.run('fork', 'last', '--at', '2');
    expect(fork.stderr).toMatch(/line 7: RUN.*\(cached\)/);
    expect(fork.json).toMatchObject({ status: 'failed', reward: { value: 0 } });
    expect(outputsOf(await eventsOf()).at(-1)).toBe('seen\nbin\nreport.py\nstock.db\n');
  });

  it('killed with -9 it goes on where it was, each command having left its trace once', async () => {
    await stage.vendor(SOLVES);
    let child = stage.start('run', TASK, ...stage.model);
    for (const said of [/\[m1\.1\]/, /\[m3\.1\]/, /\[m5\.1\]/]) {
      await heard(child, said);
      child.kill('SIGKILL');
      await once(child, 'exit');
      child = stage.start('resume', 'last');
    }
    const { json } = await finished(child);
    expect(json).toMatchObject({ status: 'succeeded', reward: { value: 1 } });
    const events = await eventsOf();
    expect(fold(events).head).toBe(events.length);
    expect(outputsOf(events).at(-1)).toBe('seen\nran\nchecked\n');
  });

  it('interrupted while its image is built it leaves no run and no image', async () => {
    await stage.vendor(SOLVES);
    const dockerfile = 'FROM host\nRUN echo begun; sleep 100\n';
    const dir = taskDir({ 'environment/Dockerfile': dockerfile });
    const child = stage.start('run', dir, ...stage.model);
    const ending = finished(child);
    await heard(child, /begun/);
    await sleep(100);
    child.kill('SIGINT');
    expect((await ending).json).toMatchObject({ error: { code: 'Interrupted' } });
    const images = join(stage.home, 'sandbox', 'images');
    const left = existsSync(images) ? readdirSync(images) : [];
    expect(left.filter((name) => name.endsWith('.json'))).toEqual([]);
    expect((await stage.run('runs')).json).toEqual({ runs: [], jobs: [] });
  });

  it('says what apt lacks before a run exists', async () => {
    await stage.vendor(SOLVES);
    const dir = taskDir({ 'environment/Dockerfile': 'FROM host\nRUN apt-get install -y tree\n' });
    const { code, json } = await stage.run('run', dir, ...stage.model);
    expect(code).toBe(2);
    expect(json).toMatchObject({
      error: {
        code: 'CapabilityMissing',
        message: expect.stringMatching(/Dockerfile line 2: RUN failed.*one uid/s),
        next: expect.stringContaining('docker save'),
      },
    });
  });

  it('without a network it is not run unless the user allows one, which resume then keeps', async () => {
    await stage.vendor({
      turns: [
        call('shell', { command: 'echo $HTTP_PROXY; touch here' }),
        { text: 'done', delayMs: 200 },
      ],
    });
    const dir = taskDir({
      'task.toml': '[environment]\nallow_internet = true\n',
      'tests/test.sh':
        '[ -e here ] && [ -n "$HTTP_PROXY" ] && echo 1 > /logs/verifier/reward.txt\n',
    });
    const refused = await stage.run('run', dir, ...stage.model);
    expect(refused.json).toMatchObject({
      error: { code: 'CapabilityMissing', next: expect.stringContaining('--allow HOST') },
    });
    const child = stage.start('run', dir, ...stage.model, '--allow', 'example.org:443');
    await heard(child, /\[m2\.1\]|http:\/\//);
    child.kill('SIGKILL');
    await once(child, 'exit');
    const { json } = await stage.run('resume', 'last');
    expect(json).toMatchObject({ status: 'succeeded', reward: { value: 1 } });
    const asked = (await eventsOf()).filter((event) => event.type === 'tool.requested');
    expect(asked).toMatchObject([{ data: { tool: 'shell', effect: 'once' } }]);
  });
});

it('a task that needs an image, without bubblewrap: says what is missing', async () => {
  await stage.vendor(SOLVES);
  const { code, json } = await stage.run('--sandbox', 'wasm', 'run', TASK, ...stage.model);
  expect(code).toBe(2);
  expect(json).toMatchObject({
    error: {
      code: 'CapabilityMissing',
      message: expect.stringMatching(/images are built and run in bubblewrap.*wasm/),
    },
  });
});
