import { describe, expect, it } from 'vitest';
import { checkCall } from '../../agent/call.ts';
import { type GradedReward, type Message, Rng } from '../../core/index.ts';
import { CASES, drawCases, same } from './cases.ts';
import { drawTasks, openTask, programs, readTask, rewardOf } from './environment.ts';
import { readResults } from './harness.ts';
import { shuffledFeedback } from './shuffled-feedback.ts';
import { bucket, DOMAINS, evaluate, formatSpec, parseSpec, parts, writeProgram } from './spec.ts';
import { demonstrate, failsCases, teacherHabit } from './teacher.ts';
import { observation, readObservation, type Verdict, verdict } from './verdict.ts';

const right = (text: string) => parts(parseSpec(text)).map(() => false);

describe('specs', () => {
  it.each([
    ['s:rev,bang', "x[::-1]+'!'", "[...x].reverse().join('')+'!'", 'abc', 'cba!'],
    ['s:bang,rev', "(x+'!')[::-1]", "[...x+'!'].reverse().join('')", 'abc', '!cba'],
    ['s:pre*,rep2', "('*'+x)*2", "('*'+x).repeat(2)", 'ab', '*ab*ab'],
    ['s:suf?,noa,cntb', "(x+'?').replace('a','').count('b')", null, 'abb', 2],
    ['l:gt0,dec9', '[v-9 for v in [v for v in x if v>0]]', null, [3, -1], [-6]],
    ['l:sort,tail,sum', 'sum(sorted(x)[1:])', null, [3, 1, 2], 5],
    ['i:add8,mul3', '(x+8)*3', '(x+8)*3', -2, 18],
    ['i:mul3,add8', 'x*3+8', 'x*3+8', -2, 2],
    ['i:sub2,neg', '-(x-2)', '-(x-2)', 5, -3],
    ['i:neg,sq', '(-x)**2', '(-x)**2', 3, 9],
    ['i:add1,mod3', '(x+1)%3', '((x+1)%3+3)%3', -9, 1],
    ['i:sub1,div4', '(x-1)//4', 'Math.floor((x-1)/4)', -4, -2],
    ['c:neg?mul3:add1', 'x*3 if x<0 else x+1', 'x<0?x*3:x+1', -2, -6],
  ])('%s', (text, python, javascript, input, expected) => {
    const spec = parseSpec(text);
    expect(formatSpec(spec)).toBe(text);
    expect(writeProgram(spec, 'python', right(text))).toBe(python);
    if (javascript !== null) expect(writeProgram(spec, 'javascript', right(text))).toBe(javascript);
    expect(evaluate(spec, right(text), input)).toEqual(expected);
  });

  it.each(['x:rev', 's:', 's:fly', 'l:sort,bang', 'c:neg?mul3', 'c:maybe?add1:add2', ''])(
    'refuses %j as TaskInvalid',
    (text) => {
      expect(() => parseSpec(text)).toThrow(expect.objectContaining({ code: 'TaskInvalid' }));
    },
  );

  it('keeps training, validation and held-out specs apart, single operations in training', () => {
    const specs = (name: Parameters<typeof drawTasks>[0]) =>
      drawTasks(name, 3, 400).map((task) => task.spec);
    for (const name of ['train', 'validation', 'heldout'] as const)
      for (const spec of specs(name)) expect(bucket(spec)).toBe(name);
    for (const spec of [...specs('validation'), ...specs('heldout')])
      expect(parts(spec).length).toBeGreaterThan(1);
  });

  it('has at least 800 distinct held-out specs, in all domains alike', () => {
    const tasks = drawTasks('heldout', 1, 832);
    expect(new Set(tasks.map((task) => formatSpec(task.spec))).size).toBe(832);
    for (const domain of DOMAINS)
      expect(tasks.filter((task) => task.ref.domain === domain)).toHaveLength(208);
  });

  it('ends where a bucket has no more distinct specs', () => {
    const tasks = drawTasks('validation', 1, 20_000);
    expect(tasks.length).toBeLessThan(20_000);
    expect(new Set(tasks.map((task) => formatSpec(task.spec))).size).toBe(tasks.length);
  });
});

describe('cases', () => {
  it('show every single wrong part', () => {
    for (const { spec, cases } of drawTasks('train', 5, 400)) {
      expect(cases).toHaveLength(CASES);
      for (const part of parts(spec).keys()) {
        const mistakes = parts(spec).map((_, i) => i === part);
        expect(failsCases(spec, mistakes, cases)).toBe(true);
      }
    }
  });
  it('are a function of spec and seed', () => {
    const spec = parseSpec('l:sort,tail,sum');
    expect(drawCases(spec, 1)).toEqual(drawCases(spec, 1));
    expect(drawCases(spec, 1)).not.toEqual(drawCases(spec, 2));
  });
  it('refuse a spec that hides one of its parts', () => {
    expect(drawCases(parseSpec('s:up,low'), 1)).toBeNull();
    expect(() => readTask({ ...REF, id: 's:up,low#1' })).toThrow(/no cases/);
  });
  it('tell a number from its text and a list from a list that is longer', () => {
    expect(same(1, '1')).toBe(false);
    expect(same([1], [1, 2])).toBe(false);
    expect(same([1, 2], [1, 2])).toBe(true);
    expect(same(0, -0)).toBe(true);
    expect(same(null, null)).toBe(true);
  });
});

describe('the faulty teacher', () => {
  it('is right at times, wrong by habit at others, and changes a program that failed', () => {
    const tasks = drawTasks('heldout', 2, 600);
    let first = 0;
    let habit = 0;
    for (const [i, task] of tasks.entries()) {
      const turns = demonstrate(Rng.of(1, i), task.spec, task.cases, 'python', 3);
      if (turns[0]?.verdict.kind === 'solved') first += 1;
      if (!failsCases(task.spec, teacherHabit(task.spec), task.cases)) habit += 1;
      expect(new Set(turns.map((turn) => turn.program)).size).toBe(turns.length);
      for (const turn of turns.slice(0, -1)) expect(turn.verdict.kind).not.toBe('solved');
    }
    // The start that the quickstart promises to rise from.
    expect(first / tasks.length).toBeGreaterThan(0.2);
    expect(first / tasks.length).toBeLessThan(0.4);
    expect(habit / tasks.length).toBeGreaterThan(0.2);
    expect(habit / tasks.length).toBeLessThan(0.4);
  });
});

const REF = { environment: 'programs', domain: 'strings', split: 'train' } as const;
const CASE = { input: 'ab', expected: 'ba' };

describe('verdicts', () => {
  const cases = [CASE, { input: 'c', expected: 'c' }];
  it.each<[string, Parameters<typeof verdict>[1], string]>([
    ['all right', [{ value: 'ba' }, { value: 'c' }], '+'],
    ['wrong', [{ value: 'ab' }, { value: 'c' }], '!ab>ba:ab='],
    ['an error', [{ value: 'ba' }, { error: 'Index' }], '!EIndex='],
    ['too few results', [{ value: 'ba' }], '!EOutput='],
    ['nothing', [], '!EOutput='],
    ['the wrong type', [{ value: [1, 2] }], '!ab>ba:1,2='],
    ['a long value', [{ value: 'x'.repeat(1e6) }], `!ab>ba:${'x'.repeat(11)}~=`],
    ['unprintable text', [{ value: 'a\n\u0000é\ue001' }], '!ab>ba:a????='],
  ])('%s', (_, results, text) => {
    const judged: Verdict = verdict(cases, results);
    expect(observation(judged)).toBe(text);
    expect(readObservation(text)).toBe(judged.kind);
  });

  it('an output that looks like an error or a success in a wrong case stays wrong', () => {
    for (const value of ['E', '+', '!E=']) {
      const judged = verdict([CASE], [{ value }]);
      expect(readObservation(observation(judged))).toBe('wrong');
    }
  });
});

describe('a call that never reaches the tool', () => {
  const [task] = drawTasks('train', 1, 1);
  const { tools } = openTask(task!, 'python');
  it.each<[string, unknown]>([
    ['a missing argument', {}],
    ['an argument of the wrong type', { program: 7 }],
    ['text that is no JSON', '{"program":'],
  ])('%s is an invalid try', (_, input) => {
    const call = { callId: 'c', tool: 'submit', input };
    const checked = checkCall(tools, call);
    const content = 'observation' in checked ? checked.observation : '';
    expect(content).toMatch(/arguments/);
    expect(readObservation(content)).toBe('invalid');
    const messages: Message[] = [
      { role: 'assistant', content: '', toolCalls: [call] },
      { role: 'tool', callId: 'c', tool: 'submit', content },
    ];
    expect(rewardOf({ messages })).toMatchObject({ value: -0.05, perStep: [-0.05] });
  });
});

describe('hostile output', () => {
  const exited = {
    cause: 'exited',
    code: 0,
    signal: null,
    stderr: '',
    stdoutBytes: 0,
    stderrBytes: 0,
    durationMs: 1,
  } as const;
  it.each([
    '',
    'null',
    '{}',
    '[{"i":1}][{"i":1}]',
    '[{"i":1.5}]',
    '[{"i":"1"}]',
    '[{"l":["1"]}]',
    '[{"__proto__":{"i":1}}]',
    '[[[[',
    '[null]',
    '['.repeat(1e5),
  ])('output %#', (stdout) => {
    const [result] = readResults({ ...exited, stdout });
    expect(verdict([{ input: 1, expected: 1 }], result ? [result] : []).kind).toBe('invalid');
  });
  it('names how a process ended', () => {
    const kinds = [
      readResults({ ...exited, stdout: '', cause: 'timeout', code: null }),
      readResults({ ...exited, stdout: '', cause: 'out_of_memory', code: null }),
      readResults({ ...exited, stdout: '', cause: 'output_limit', code: null }),
      readResults({ ...exited, stdout: '', cause: 'signalled', code: null, signal: 'SIGVTALRM' }),
      readResults({ ...exited, stdout: '[{"i":1}]', code: 1 }),
    ];
    expect(kinds).toEqual(['Time', 'Memory', 'Output', 'Time', 'Exit'].map((error) => [{ error }]));
  });
});

describe('a run', () => {
  const said = (...outputs: string[]): Message[] => [
    { role: 'user', content: 's:rev=' },
    ...outputs.flatMap((content): Message[] => [
      {
        role: 'assistant',
        content: '',
        toolCalls: [{ callId: 'c', tool: 'submit', input: { program: 'x' } }],
      },
      { role: 'tool', callId: 'c', tool: 'submit', content },
    ]),
  ];
  const cut: Message = { role: 'assistant', content: 'x[' };
  it.each<[string, Message[], number, boolean, string]>([
    ['nothing yet', said(), 0, false, 'ok'],
    ['solved at once', said('+'), 1, true, 'ok'],
    ['solved at the second try', said('!ab>ba:ab=', '+'), 0.9, true, 'ok'],
    [
      'solved at the third, one invalid',
      said('!ETime=', '!a>b:c=', '+'),
      0.8 - 0.05 / 3,
      true,
      'ok',
    ],
    ['three wrong', said('!a>b:c=', '!a>b:c=', '!a>b:c='), 0, true, 'ok'],
    ['three invalid', said('!EType=', '!EType=', '!EType='), -0.05, true, 'ok'],
    ['cut off', [...said(), cut], -0.05, false, 'truncated'],
    ['cut off at the second try', [...said('!a>b:c='), cut], -0.025, false, 'truncated'],
  ])('%s', async (_, messages, value, over, status) => {
    const session = openTask(readTask({ ...REF, id: 's:rev#1' }), 'python');
    const reward = rewardOf({ messages });
    expect(reward.value).toBeCloseTo(value, 10);
    expect(reward.status).toBe(status);
    const calls = messages.filter((message) => message.role === 'assistant').length;
    expect((reward as GradedReward).perStep).toHaveLength(calls);
    expect(session.isOver({ messages } as never)).toBe(over);
  });

  it('opens what the task list names, and nothing else', async () => {
    const environment = programs('python');
    for (const ref of environment.tasks('heldout', 1, 20)) {
      const session = await environment.open(ref);
      expect(session.ref).toEqual(ref);
      expect(session.messages).toEqual([
        { role: 'user', content: `${ref.id.replace(/#.*/, '')}=` },
      ]);
    }
    await expect(environment.open({ ...REF, id: 's:rev' })).rejects.toThrow(/SPEC#SEED/);
    await expect(environment.open({ ...REF, id: 's:rev#1', split: 'heldout' })).rejects.toThrow(
      /belongs to train/,
    );
  });
});

it('shuffled feedback keeps success and errors and changes the wrong case', async () => {
  const results: Record<string, string> = {
    right: '[{"s":"6162"}]',
    error: '[{"e":"Type"}]',
  };
  const environment = shuffledFeedback(programs('python'), 1);
  const [ref] = environment.tasks('train', 1, 1);
  const session = await environment.open(ref!);
  const [tool] = session.tools;
  const sandbox = (stdout: string) => ({
    runCode: async () => [
      {
        cause: 'exited',
        code: 0,
        signal: null,
        stdout,
        stderr: '',
        stdoutBytes: 0,
        stderrBytes: 0,
        durationMs: 1,
      },
    ],
  });
  const run = (stdout: string) =>
    tool!.run({ program: 'x' }, { sandbox: sandbox(stdout) } as never);
  expect((await run(results.error!)).output).toBe('!EType=');
  const { output } = await run(results.right!);
  expect(readObservation(output)).toBe('wrong');
  const shown = readTask(ref!).cases.map((item) => String(item.input));
  expect(shown.some((input) => output.startsWith(`!${input}>`))).toBe(false);
});
