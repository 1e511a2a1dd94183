import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { LonghaulError } from '../../core/index.ts';
import { Lockstep } from '../../model/lockstep.ts';
import { BubblewrapDriver } from '../../sandbox/bubblewrap/driver.ts';
import type { SandboxDriver } from '../../sandbox/contract.ts';
import { WasmDriver } from '../../sandbox/wasm/driver.ts';
import { AGAINST_NEIGHBOURS, auditPrograms } from './audit.ts';
import { drawTasks, openTask, type ProgramTask } from './environment.ts';
import { SharedSandboxes } from './shared-sandbox.ts';
import { parts, writeProgram } from './spec.ts';

const root = mkdtempSync(join(tmpdir(), 'programs-'));
const driver = await BubblewrapDriver.open({ dir: root }).catch((error: Error) => error);
const reason = driver instanceof Error ? driver.message : '';

describe.skipIf(driver instanceof Error)(`in bubblewrap ${reason}`, () => {
  const python = driver as SandboxDriver;
  const [task] = drawTasks('train', 1, 1) as [ProgramTask];
  const right = writeProgram(
    task.spec,
    'python',
    parts(task.spec).map(() => false),
  );
  let sandbox: Awaited<ReturnType<SandboxDriver['create']>>;
  beforeAll(async () => {
    sandbox = await python.create(openTask(task, 'python').sandbox);
  });
  afterAll(async () => {
    await sandbox?.stop();
    await python.close();
    rmSync(root, { recursive: true, force: true });
  });

  it('passes its audit', async () => {
    const report = await auditPrograms(python, 'python', 120, 7);
    expect(report.lines.filter((line) => !line.startsWith('ok'))).toEqual([]);
    expect(report.passed).toBe(true);
    expect(report.checks.every((check) => check.tried > 20)).toBe(true);
  });

  it.each([
    ['an endless loop', '[i for i in iter(int,1)]', /^!ETime=$/],
    ['endless in C', '10**10**10', /^!E(Time|Memory)=$/],
    [
      'endless with the timer disarmed',
      `[__import__('signal').setitimer(1,0),list(iter(int,1))]`,
      /^!E\w+=$/,
    ],
    ['a memory bomb', "'x'*(1<<40)", /^!EMemory=$/],
    ['a slow memory bomb', '[bytearray(1<<24) for i in range(10**9)]', /^!E(Memory|Time)=$/],
    ['deep recursion', '(f:=lambda n:f(n))(1)', /^!E\w+=$/],
    ['an exit', `__import__('os')._exit(0)`, /^!EOutput=$/],
    ['a crash', `__import__('ctypes').string_at(0)`, /^!E\w+=$/],
    ['a syntax error', 'x[', /^!ESyntax=$/],
    ['a null byte', 'x\u0000', /^!ESyntax=$/],
    ['a statement', 'import os', /^!ESyntax=$/],
    ['a function', 'lambda:1', /^!EType=$/],
    ['a float', '1.5', /^!EType=$/],
    ['a huge number', '10**4000', /^!ELarge=$/],
    ['an own exception', '1/0', /^!EZeroDivision=$/],
    ['a fork', `[__import__('os').fork(),x][1]`, /^!/],
    ['fake output', `__import__('os').write(3,b'[{"i":1}]')`, /^!/],
    [
      'a patched built-in',
      `[__builtins__.__setitem__('repr',lambda v:'1') if type(__builtins__) is dict else setattr(__builtins__,'repr',lambda v:'1'),1.5][1]`,
      /^!/,
    ],
  ])('%s is an observation', async (_, program, expected) => {
    const [tool] = openTask(task, 'python').tools;
    const run = (text: string) => tool!.run({ program: text }, { sandbox } as never);
    expect((await run(program)).output).toMatch(expected);
    // And the sandbox goes on.
    expect((await run(right)).output).toBe('+');
  });

  it('evaluates the programs of many submits in one round trip, each on its own', async () => {
    const lockstep = new Lockstep();
    let trips = 0;
    let programs = 0;
    const counted = {
      create: async () => ({
        ...sandbox,
        stop: async () => {},
        runCode: (requests: Parameters<typeof sandbox.runCode>[0]) => {
          trips += 1;
          programs += requests.length;
          return sandbox.runCode(requests);
        },
      }),
    };
    const shared = new SharedSandboxes(counted as never, {}, lockstep, 2);
    const outputs = await Promise.all(
      [...drawTasks('train', 2, 12), ...drawTasks('train', 2, 1)].map((each, index) =>
        lockstep.run(index, async (lane) => {
          const [tool] = openTask(each, 'python').tools;
          const view = await shared.forLane(lane).create();
          const program =
            index === 5
              ? `__import__('os')._exit(1)`
              : writeProgram(
                  each.spec,
                  'python',
                  parts(each.spec).map(() => false),
                );
          return (await tool!.run({ program }, { sandbox: view } as never)).output;
        }),
      ),
    );
    expect(trips).toBe(2);
    // The thirteenth says the same of the same task as the first.
    expect(programs).toBe(12);
    expect(outputs).toEqual(outputs.map((_, i) => (i === 5 ? '!EExit=' : '+')));
  });
});

describe.skipIf(driver instanceof Error)(`hostile neighbours in bubblewrap ${reason}`, () => {
  const tasks = drawTasks('train', 3, 4);
  const right = (task: ProgramTask) =>
    writeProgram(
      task.spec,
      'python',
      parts(task.spec).map(() => false),
    );
  let python: SandboxDriver;
  beforeAll(async () => {
    python = await BubblewrapDriver.open({ dir: join(root, 'neighbours'), warm: 0 });
  });
  afterAll(() => python?.close());

  /** One batch through shared sandboxes: what each program's agent reads. */
  async function batch(shared: SharedSandboxes, lockstep: Lockstep, programs: string[]) {
    return Promise.all(
      programs.map((program, index) =>
        lockstep.run(index, async (lane) => {
          const [tool] = openTask(tasks[index % tasks.length]!, 'python').tools;
          const sandbox = await shared.forLane(lane).create();
          try {
            return (await tool!.run({ program }, { sandbox } as never)).output;
          } catch (error) {
            return (error as { code: string }).code;
          }
        }),
      ),
    );
  }
  /** Right programs with a bad one among them, at 1. */
  const around = (bad: string) => tasks.map((task, i) => (i === 1 ? bad : right(task)));
  const SOLVED_BUT_ONE = ['+', expect.stringMatching(/^!E\w+=$/), '+', '+'];

  it('in one batch and the ones after it, right programs still solve', async () => {
    const lockstep = new Lockstep();
    const shared = new SharedSandboxes(python, openTask(tasks[0]!, 'python').sandbox, lockstep, 1);
    for (const bad of AGAINST_NEIGHBOURS) {
      expect(await batch(shared, lockstep, around(bad)), bad).toEqual(SOLVED_BUT_ONE);
      expect(await batch(shared, lockstep, tasks.map(right)), `after ${bad}`).toEqual(
        tasks.map(() => '+'),
      );
    }
    await shared.close();
  });

  /** Sandboxes of the real driver that stop for good when they are given a program with this text. */
  function fragile(text: string, made: { count: number; limit: number }): SandboxDriver {
    const create: SandboxDriver['create'] = async (spec) => {
      if (++made.count > made.limit)
        throw new LonghaulError('SandboxUnavailable', 'no more sandboxes');
      const sandbox = await python.create(spec);
      const runCode = sandbox.runCode.bind(sandbox);
      sandbox.runCode = async (requests) => {
        if (requests.some((request) => request.source.includes(text))) await sandbox.stop();
        return runCode(requests);
      };
      return sandbox;
    };
    return { ...python, create };
  }

  it('a program that breaks its sandbox is invalid, and costs its neighbours nothing', async () => {
    const lockstep = new Lockstep();
    const made = { count: 0, limit: 100 };
    const shared = new SharedSandboxes(fragile('BREAKS', made), {}, lockstep, 1);
    const outputs = await batch(shared, lockstep, around(`'BREAKS'`));
    expect(outputs).toEqual(['+', '!EKilled=', '+', '+']);
    expect(made.count).toBeLessThan(8);
    expect(await batch(shared, lockstep, tasks.map(right))).toEqual(tasks.map(() => '+'));
    await shared.close();
  });

  it('where the machine fails a good program too, the batch is its fault and ungraded', async () => {
    const lockstep = new Lockstep();
    const everything = new SharedSandboxes(fragile('', { count: 0, limit: 100 }), {}, lockstep, 1);
    expect(await batch(everything, lockstep, tasks.map(right))).toEqual(
      tasks.map(() => 'SandboxBroken'),
    );
    for (const limit of [1, 2, 3, 4]) {
      const shared = new SharedSandboxes(fragile('BREAKS', { count: 0, limit }), {}, lockstep, 1);
      const outputs = await batch(shared, lockstep, around(`'BREAKS'`));
      expect(outputs.every((each) => /^Sandbox(Broken|Unavailable)$/.test(each))).toBe(true);
      await shared.close();
    }
  });
});

describe('in wasm', () => {
  const dir = mkdtempSync(join(tmpdir(), 'programs-wasm-'));
  let wasm: WasmDriver;
  let sandbox: Awaited<ReturnType<SandboxDriver['create']>>;
  beforeAll(async () => {
    wasm = await WasmDriver.open({ dir });
    sandbox = await wasm.create({ memoryBytes: 256 << 20 });
  });
  afterAll(async () => {
    await sandbox?.stop();
    await wasm?.close();
    rmSync(dir, { recursive: true, force: true });
  });

  it.each([
    ['javascript', 60],
    ['python', 6],
  ] as const)('passes its audit in %s', async (language, tasks) => {
    const report = await auditPrograms(wasm, language, tasks, 7);
    expect(report.lines.filter((line) => !line.startsWith('ok'))).toEqual([]);
    expect(report.passed).toBe(true);
  });

  it.each([
    ['an endless loop', '(()=>{for(;;);})()', /^!ETime=$/],
    ['a memory bomb', "'x'.repeat(1<<29).split('')", /^!E\w+=$/],
    ['a syntax error', 'x[', /^!ESyntax=$/],
    ['a way out of the function', '1)}; print("[{}]"); (()=>{(0', /^!E\w+=$/],
    ['a function', '()=>1', /^!EType=$/],
    ['a fake print', `print('[{"i":1}]')`, /^!EType=$/],
    ['a patched built-in', '(JSON.stringify=()=>"1",Array.prototype.push=()=>1,1.5)', /^!E\w+=$/],
    ['a throw', '(()=>{throw 1})()', /^!E/],
  ])('%s is an observation', async (_, program, expected) => {
    const [task] = drawTasks('train', 1, 1);
    const [tool] = openTask(task!, 'javascript').tools;
    const run = (text: string) => tool!.run({ program: text }, { sandbox } as never);
    expect((await run(program)).output).toMatch(expected);
    const right = writeProgram(task!.spec, 'javascript', []);
    expect((await run(right)).output).toBe('+');
  });

  it.each([
    ['an endless loop', '[i for i in iter(int,1)]', /^!E(Time|Memory)=$/],
    ['endless in C', '10**10**10', /^!E\w+=$/],
    ['a memory bomb', '[bytearray(1<<24) for i in range(10**9)]', /^!E(Memory|Time)=$/],
    ['deep recursion', '(f:=lambda n:f(n))(1)', /^!ERecursion=$/],
    ['an exit', `__import__('os')._exit(0)`, /^!EOutput=$/],
    ['an abort', `__import__('os').abort()`, /^!EKilled=$/],
    ['a syntax error', 'x[', /^!ESyntax=$/],
    ['a function', 'lambda:1', /^!EType=$/],
    ['an own exception', '1/0', /^!EZeroDivision=$/],
    ['a fake print', `print('[{"i":1}]')`, /^!EType=$/],
    ['a fork', `[__import__('os').fork(),x][1]`, /^!EAttribute=$/],
  ])('%s in Python is an observation', async (_, program, expected) => {
    const [task] = drawTasks('train', 1, 1);
    const [tool] = openTask(task!, 'python').tools;
    const run = (text: string) => tool!.run({ program: text }, { sandbox } as never);
    expect((await run(program)).output).toMatch(expected);
    const right = writeProgram(task!.spec, 'python', []);
    expect((await run(right)).output).toBe('+');
  });

  it.skipIf(driver instanceof Error)(
    `grades the same Python programs as bubblewrap ${reason}`,
    async () => {
      const bubblewrap = await BubblewrapDriver.open({ dir: join(dir, 'bubblewrap'), warm: 0 });
      const tasks = drawTasks('train', 5, 12);
      const wrong = (task: ProgramTask, index: number) =>
        writeProgram(
          task.spec,
          'python',
          parts(task.spec).map((_, i) => i === index % parts(task.spec).length),
        );
      const programs = tasks.map((task, index) =>
        index % 2 === 0 ? writeProgram(task.spec, 'python', []) : wrong(task, index),
      );
      const grades = [];
      for (const each of [bubblewrap, wasm]) {
        const made = await each.create(openTask(tasks[0]!, 'python').sandbox);
        const seen = [];
        for (const [index, task] of tasks.entries()) {
          const [tool] = openTask(task, 'python').tools;
          const context = { sandbox: made } as never;
          seen.push((await tool!.run({ program: programs[index]! }, context)).output);
        }
        grades.push(seen);
        await made.stop();
      }
      await bubblewrap.close();
      expect(grades[1]).toEqual(grades[0]);
      expect(new Set(grades[1]).size).toBeGreaterThan(2);
    },
  );
});
