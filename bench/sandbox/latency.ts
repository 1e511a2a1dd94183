import { join } from 'node:path';
import { BubblewrapDriver, type Sandbox } from '../../src/sandbox/index.ts';
import { type BenchRun, quantile, type Row } from '../row.ts';
import { coldPython } from './baseline.ts';
import { COLD_ROW_NOTE, latencyRow, settle, timed } from './measure.ts';

const SNIPPET = 'print(1)';
const HANDOUT_BAR = { p50: 3, p99: 20 };
const PYTHON_BAR = { p50: 3, ratio: 1 / 8 };

export async function runSnippet(
  sandbox: Sandbox,
  source: string,
  expected: string,
): Promise<void> {
  const [result] = await sandbox.runCode([{ language: 'python', source }]);
  if (result!.stdout !== expected)
    throw new Error(`a snippet gave ${JSON.stringify(result)} instead of ${expected}`);
}

async function runEcho(sandbox: Sandbox): Promise<void> {
  const result = await sandbox.exec({ argv: ['echo', '1'] });
  if (result.stdout !== '1\n') throw new Error(`a command gave ${JSON.stringify(result)}`);
}

/**
 * From asking the warm pool to the output of the first snippet, against the same of a driver that keeps
 * nothing warm. Between two the pool refills, unmeasured.
 */
export async function handoutRow(home: string, run: BenchRun): Promise<Row> {
  const dir = join(home, 'bench', 'sandbox');
  const rounds = run.quick ? 20 : 200;
  const warm = await BubblewrapDriver.open({ dir, warm: 2 });
  const cold = await BubblewrapDriver.open({ dir, warm: 0 });
  try {
    const first = async (
      driver: BubblewrapDriver,
      times: number[],
      use: (sandbox: Sandbox) => Promise<void> = (sandbox) => runSnippet(sandbox, SNIPPET, '1\n'),
    ) => {
      let sandbox!: Sandbox;
      times.push(
        await timed(async () => {
          sandbox = await driver.create();
          await use(sandbox);
        }),
      );
      await sandbox.stop();
      await settle();
    };
    // The pool learns what is wanted from the first request; it is not measured.
    await first(warm, []);
    const handouts: number[] = [];
    const commands: number[] = [];
    const starts: number[] = [];
    for (let i = 0; i < rounds; i++) {
      await first(warm, handouts);
      if (i % 5 !== 0) continue;
      await first(warm, commands, runEcho);
      await first(cold, starts);
    }
    return latencyRow(
      'handout',
      handouts,
      starts,
      {
        words: `p50 ≤ ${HANDOUT_BAR.p50} ms and p99 ≤ ${HANDOUT_BAR.p99} ms`,
        holds: ({ p50, p99 }) => p50 <= HANDOUT_BAR.p50 && p99 <= HANDOUT_BAR.p99,
      },
      `create from a warm pool and the output of a first Python snippet (of a command instead: p50 ${quantile(commands, 0.5).toFixed(1)} ms); baseline: the same without a pool`,
    );
  } finally {
    await warm.close();
    await cold.close();
  }
}

/** A snippet in a sandbox that has run others, against a cold bubblewrap with a new interpreter. */
export async function pythonRow(home: string, run: BenchRun): Promise<Row> {
  const driver = await BubblewrapDriver.open({ dir: join(home, 'bench', 'sandbox'), warm: 0 });
  try {
    const sandbox = await driver.create({ cpus: 2 });
    const [turns, each] = run.quick ? [10, 5] : [40, 15];
    for (let i = 0; i < 20; i++) await runSnippet(sandbox, SNIPPET, '1\n');
    const warm: number[] = [];
    const cold: number[] = [];
    const commands: number[] = [];
    for (let i = 0; i < turns; i++) {
      for (let j = 0; j < each; j++)
        warm.push(await timed(() => runSnippet(sandbox, SNIPPET, '1\n')));
      cold.push(await timed(() => coldPython(SNIPPET, '1\n')));
      commands.push(await timed(() => sandbox.exec({ argv: ['true'] })));
    }
    return latencyRow(
      'exec.python',
      warm,
      cold,
      {
        words: `p50 ≤ ${PYTHON_BAR.p50} ms and ≤ 1/8 of cold bwrap`,
        holds: ({ p50, ratio }) => p50 <= PYTHON_BAR.p50 && ratio <= PYTHON_BAR.ratio,
      },
      `${COLD_ROW_NOTE}; the command \`true\` in the same sandbox: p50 ${quantile(commands, 0.5).toFixed(1)} ms`,
    );
  } finally {
    await driver.close();
  }
}
