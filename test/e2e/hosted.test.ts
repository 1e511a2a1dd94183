import { spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Event, fold, Rng } from '../../src/core/index.ts';
import type { Reply } from '../chat-server/scenario.ts';
import type { Scenario } from '../chat-server/server.ts';
import { finished, heard, Stage, task } from './processes.ts';

const bubblewrap = spawnSync('bwrap', ['--version']).status === 0;

const call = (name: string, args: string | Record<string, unknown>): Reply => ({
  toolCalls: [{ name, arguments: args }],
});

/** Solves `fix-python-package` with an invalid call, a wrong attempt and a look at what it did. */
const SOLVES: Scenario = {
  turns: [
    call('shell', {
      command: 'python3 -m unittest discover -s tests 2>&1 | tail -3; echo seen >> visits',
    }),
    call('edit_file', '{"path": "slotbook/times.py", "old": '),
    call('edit_file', {
      path: 'slotbook/times.py',
      old: '    if match[3].lower() == "pm" and hour != 12:\n        hour += 12\n',
      new: '    hour %= 12\n    if match[3].lower() == "pm":\n        hour += 12\n',
    }),
    call('shell', { command: 'echo tried >> visits; python3 -m unittest discover -s tests' }),
    call('execute_code', {
      language: 'python',
      code: "import pathlib\np = pathlib.Path('slotbook/schedule.py')\nt = p.read_text()\nassert t.count('(blocks[-1][0], end)') == 1\np.write_text(t.replace('(blocks[-1][0], end)', '(blocks[-1][0], max(blocks[-1][1], end))'))\nprint('edited')",
    }),
    call('shell', {
      command: 'echo checked >> visits; python3 -m unittest discover -s tests && cat visits',
    }),
    { text: 'Both defects are fixed.' },
  ].map((reply) => ({ ...reply, delayMs: 15 })),
};

interface Shown {
  run: { status: string; head: number };
  events: Event[];
}

let stage: Stage;
beforeEach(() => {
  stage = new Stage();
});
afterEach(() => stage.close());

const show = async (id = 'last') => (await stage.run('show', id)).json as unknown as Shown;
const requestsByTurn = () => {
  const counts: Record<number, number> = {};
  for (const line of readFileSync(stage.requestLog, 'utf8').trim().split('\n')) {
    const { turn } = JSON.parse(line) as { turn: number };
    counts[turn] = (counts[turn] ?? 0) + 1;
  }
  return counts;
};

describe.skipIf(!bubblewrap)('a hosted run (bubblewrap is needed)', () => {
  it('corrects itself from observations, is graded, and asks the model once a step', async () => {
    await stage.vendor(SOLVES);
    const { code, json } = await stage.run('run', task('fix-python-package'), ...stage.model);
    expect(json).toMatchObject({ status: 'succeeded', reward: { value: 1, status: 'ok' } });
    expect(code).toBe(0);
    expect(Object.values(requestsByTurn())).toEqual([1, 1, 1, 1, 1, 1, 1]);
    const { events, run } = await show();
    expect(fold(events).head).toBe(run.head);
    const outputs = events.flatMap((event) =>
      event.type === 'tool.completed' ? [event.data] : [],
    );
    expect(outputs.map((data) => data.isError)).toEqual([false, true, false, true, false, false]);
    expect(outputs[1]!.output).toMatch(/not valid JSON/);
    expect(outputs[3]!.output).toMatch(/exit code 1[\s\S]*FAIL: test_night_watch/);
  });

  it('killed with -9 at random points it goes on, repeats no finished step and loses no file', async () => {
    await stage.vendor(SOLVES);
    const rng = Rng.of(5, 'kills');
    let child = stage.start('run', task('fix-python-package'), ...stage.model);
    await heard(child, /started by/);
    let kills = 0;
    for (; kills < 4; kills++) {
      await sleep(rng.int(30, 500));
      if (child.exitCode !== null) break;
      child.kill('SIGKILL');
      await once(child, 'exit');
      child = stage.start('resume', 'last');
      await Promise.race([heard(child, /resumed by/), once(child, 'exit')]);
    }
    const { json } = await finished(child);
    const shown = await show();
    expect(json.status === undefined ? shown.run.status : json.status).toBe('succeeded');

    const state = fold(shown.events);
    expect(state.head).toBe(shown.run.head);
    expect(state.reward).toMatchObject({ value: 1 });
    const completed = shown.events.flatMap((event) =>
      event.type === 'tool.completed' ? [event.data.callId] : [],
    );
    expect(new Set(completed).size).toBe(completed.length);
    const steps = shown.events.flatMap((event) =>
      event.type === 'model.completed' ? [event.data.callId.split('.')[0]] : [],
    );
    expect(steps).toEqual(['m1', 'm2', 'm3', 'm4', 'm5', 'm6', 'm7']);
    // A command that was cut off was rolled back before it ran again: each left its line once.
    expect(state.messages.at(-2)!.content).toMatch(/seen\ntried\nchecked\n/);
    for (const count of Object.values(requestsByTurn()))
      expect(count).toBeLessThanOrEqual(1 + kills);
  });

  it('waits for a model server that is killed and comes back in the middle', async () => {
    await stage.vendor(SOLVES);
    const child = stage.start('run', task('fix-python-package'), ...stage.model);
    const ending = finished(child);
    await heard(child, /\[m3\.1\]/);
    await stage.killVendor();
    await heard(child, /ModelUnreachable.*trying again/);
    await stage.vendor();
    expect((await ending).json).toMatchObject({ status: 'succeeded', reward: { value: 1 } });
    const { events } = await show();
    expect(events.some((event) => event.type === 'model.failed' && event.data.willRetry)).toBe(
      true,
    );
  });

  it('forks from a step with the files as they were then', async () => {
    await stage.vendor(SOLVES);
    await stage.run('run', task('fix-python-package'), ...stage.model);
    const parent = (await show()).events;
    await stage.killVendor();
    await stage.vendor({
      turns: [
        ...SOLVES.turns.slice(0, 2),
        call('shell', { command: 'cat visits; grep -c "hour %= 12" slotbook/times.py' }),
        { text: 'looked' },
      ],
    });
    const { json } = await stage.run(
      ...['fork', 'last', '--at', '2', '--message', 'only look', '--seed', '7'],
    );
    expect(json).toMatchObject({ status: 'failed', reward: { value: 0 } });
    const { events } = await show();
    const state = fold(events);
    expect(state.spec.parent?.runId).toBe(parent[0]!.runId);
    expect(state.spec.seed).toBe(7);
    expect(state.messages.some((message) => message.content === 'only look')).toBe(true);
    // After step 2 the first command had left its line and no edit had been made.
    const looked = events.findLast((event) => event.type === 'tool.completed');
    expect(looked?.type === 'tool.completed' && looked.data.output).toBe(
      '[exit code 1]\nseen\n0\n',
    );
    expect((await show(parent[0]!.runId)).events).toEqual(parent);
  });

  it('is stopped by another process while its model hangs, and cannot be resumed', async () => {
    await stage.vendor({ turns: [{ text: 'never ends', hangAfterChunks: 0 }] });
    const child = stage.start('run', task('fix-python-package'), ...stage.model);
    const ending = finished(child);
    await heard(child, /started by/);
    const stopping = await stage.run('stop', 'last', '--reason', 'enough');
    expect(stopping.code).toBe(0);
    expect((await ending).json).toMatchObject({ status: 'cancelled' });
    const again = await stage.run('resume', 'last');
    expect(again.code).toBe(2);
    expect(again.json).toMatchObject({ error: { code: 'ConfigInvalid' } });
  });

  it('pauses on Ctrl-C in the middle of a command and repeats that command from the files before it', async () => {
    await stage.vendor({
      turns: [
        call('shell', {
          command: 'echo begun >> visits; [ -e /tmp/never ] || sleep 30; cat visits',
        }),
        { text: 'done' },
      ],
    });
    const child = stage.start('run', task('fix-python-package'), ...stage.model);
    const ending = finished(child);
    await heard(child, /shell echo begun/);
    await sleep(300);
    child.kill('SIGINT');
    const paused = await ending;
    expect(paused.json).toMatchObject({ status: 'paused', error: { code: 'Interrupted' } });
    expect(paused.code).toBe(1);
    await stage.killVendor();
    const resumed = stage.start('resume', 'last');
    const resumedEnding = finished(resumed);
    await heard(resumed, /rolled_back|workspace is as before/);
    resumed.kill('SIGINT');
    await resumedEnding;
    const { events } = await show();
    expect(events.filter((event) => event.type === 'tool.unknown')).toMatchObject([
      { data: { resolution: 'rolled_back' } },
    ]);
  });

  it('pauses at its limit and goes on with a larger one', async () => {
    await stage.vendor(SOLVES);
    const first = await stage.run(
      'run',
      task('fix-python-package'),
      ...stage.model,
      '--model-calls',
      '2',
    );
    expect(first.json).toMatchObject({ status: 'paused', error: { code: 'BudgetExceeded' } });
    const second = await stage.run('resume', 'last', '--model-calls', '20');
    expect(second.json).toMatchObject({ status: 'succeeded', reward: { value: 1 } });
  });

  it('what a guest does to the machine comes back as an observation', async () => {
    await stage.vendor({
      turns: [
        call('shell', { command: 'head -c 100000000 /dev/zero | tr "\\0" x' }),
        call('shell', { command: 'while :; do :; done', timeout_seconds: 1 }),
        call('execute_code', { language: 'python', code: 'b = bytearray(8 << 30)' }),
        call('shell', { command: ':(){ :|:& };:; sleep 0.5; echo survived', timeout_seconds: 5 }),
        call('shell', { command: 'head -c 2000000000 /dev/zero > big; echo; ls -la big' }),
        call('shell', { command: 'printf "\\377\\376 caf\\303\\251"' }),
        call('nonsense', { x: 1 }),
        { text: 'enough' },
      ],
    });
    const { json } = await stage.run('run', task('fix-python-package'), ...stage.model);
    expect(json).toMatchObject({ status: 'failed', reward: { value: 0 } });
    const { events } = await show();
    expect(fold(events).head).toBe(events.length);
    const outputs = events.flatMap((event) =>
      event.type === 'tool.completed' ? [event.data.output] : [],
    );
    expect(outputs[0]).toMatch(/characters left out|bytes/);
    expect(outputs[0]!.length).toBeLessThan(20_000);
    expect(outputs[1]).toMatch(/time limit/);
    expect(outputs[2]).toMatch(/MemoryError|out of memory/);
    expect(outputs[4]).toMatch(/No space left|File too large|quota|out of memory/i);
    expect(outputs[5]).toContain('café');
    expect(outputs[6]).toMatch(/no tool "nonsense"/);
    expect(outputs).toHaveLength(7);
  });
});

describe('what a person gets wrong', () => {
  it.each([
    [
      'a missing task',
      [
        'run',
        '/nonexistent',
        '--model',
        'openai-compatible/x',
        '--base-url',
        'http://127.0.0.1:9/v1',
      ],
      2,
      'TaskInvalid',
    ],
    [
      'an unknown provider',
      ['run', task('wrangle-logs'), '--model', 'opnai/gpt'],
      2,
      'ConfigInvalid',
    ],
    ['a run that does not exist', ['show', '01ARZ3NDEKTSV4RRFFQ69G5FAV'], 2, 'NotFound'],
  ])('%s', async (_, args, code, error) => {
    const done = await stage.run(...args);
    expect(done.json).toMatchObject({ error: { code: error } });
    expect(done.code).toBe(code);
    expect(done.stderr).toMatch(/next: {2}\S/);
  });

  it('a typo gets a suggestion, nothing gets help', async () => {
    const typo = await stage.run('quikstart');
    expect(typo.code).toBe(2);
    expect(typo.stderr).toMatch(/Did you mean quickstart/);
    expect(existsSync(stage.home)).toBe(false);
  });
});
