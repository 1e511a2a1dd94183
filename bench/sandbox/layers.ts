import { execFile } from 'node:child_process';
import { mkdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { BubblewrapDriver, type Sandbox } from '../../src/sandbox/index.ts';
import { type BenchRun, quantile, type Row } from '../row.ts';
import { latencyRow, settle, timed } from './measure.ts';

const FILES = 5_000;
const FILE_BYTES = 40_000;
const DIRECTORIES = 50;
const FORKS = 8;
const LAYER_BAR_MS = 3;
const FORK_BAR_MS = 8;
/** The workspace, what is written over it, and room for one more copy of it. */
const SPEC = { diskBytes: 2 ** 30, cpus: 2 };
const TREE = `${FILES} files, ${(FILES * FILE_BYTES) / 1e6} MB`;

/** The same tree inside and outside: content that does not repeat within a file. */
const FILL = `
import os, random
for i in range(${FILES}):
    os.makedirs("d%d" % (i % ${DIRECTORIES}), exist_ok=True)
    with open("d%d/f%d" % (i % ${DIRECTORIES}, i), "wb") as file: file.write(random.Random(i).randbytes(${FILE_BYTES}))
print(sum(len(files) for _, _, files in os.walk(".")))
`;

async function fill(sandbox: Sandbox): Promise<void> {
  const [made] = await sandbox.runCode([{ language: 'python', source: FILL, timeoutMs: 120_000 }]);
  if (made!.stdout !== `${FILES}\n`)
    throw new Error(`cannot fill the workspace: ${JSON.stringify(made)}`);
}

/** Milliseconds that \`cp -a\` of an equal tree takes on the disk below \`dir\`, once. */
async function copyTree(dir: string): Promise<number> {
  const from = join(dir, 'tree');
  const to = join(dir, 'tree-copy');
  const clear = () => {
    for (const path of [from, to]) rmSync(path, { recursive: true, force: true });
  };
  clear();
  try {
    mkdirSync(from, { recursive: true });
    await promisify(execFile)('python3', ['-c', FILL], { cwd: from });
    return await timed(() => promisify(execFile)('cp', ['-a', from, to]));
  } finally {
    clear();
  }
}

const touch = (sandbox: Sandbox, text: string) => sandbox.writeFile('d1/f1', text);

async function contentIs(sandbox: Sandbox, expected: string | null): Promise<void> {
  const head = Buffer.from(await sandbox.readFile('d1/f1')).toString('latin1');
  if (expected === null ? head.length === FILE_BYTES : head === expected) return;
  throw new Error(`the workspace shows ${JSON.stringify(head.slice(0, 40))}`);
}

const layerBar = {
  words: `p50 ≤ ${LAYER_BAR_MS} ms`,
  holds: ({ p50 }: { p50: number }) => p50 <= LAYER_BAR_MS,
};
const forkBar = {
  words: `p50 ≤ ${FORK_BAR_MS} ms for all ${FORKS}`,
  holds: ({ p50 }: { p50: number }) => p50 <= FORK_BAR_MS,
};
const reported = { words: 'reported, no bar', holds: () => true };

/** `snapshot` and `rollback` of volatile layers, and `fork8`, on a workspace of 5,000 files and 200 MB. */
export async function volatileRows(home: string, run: BenchRun): Promise<Row[]> {
  const dir = join(home, 'bench', 'sandbox');
  const [rounds, forkRounds] = run.quick ? [10, 3] : [100, 15];
  const driver = await BubblewrapDriver.open({ dir, warm: FORKS });
  try {
    const sandbox = await driver.create(SPEC);
    await fill(sandbox);
    const copied = await copyTree(dir);
    const base = await sandbox.snapshot();
    await settle(2000); // the pool that the forks come from
    const snapshots: number[] = [];
    const rollbacks: number[] = [];
    for (let i = 0; i < rounds; i++) {
      await touch(sandbox, `round ${i}`);
      let layer = '';
      snapshots.push(
        await timed(async () => {
          layer = await sandbox.snapshot();
        }),
      );
      await touch(sandbox, 'after the snapshot');
      rollbacks.push(await timed(() => sandbox.rollback(base)));
      await driver.dropLayer(layer);
    }
    await contentIs(sandbox, null);
    const forks: number[] = [];
    for (let i = 0; i < forkRounds; i++) {
      await touch(sandbox, `fork ${i}`);
      let children: Sandbox[] = [];
      forks.push(
        await timed(async () => {
          children = await sandbox.fork(FORKS);
        }),
      );
      await Promise.all(children.map((child) => contentIs(child, `fork ${i}`)));
      await Promise.all(children.map((child) => child.stop()));
      await sandbox.rollback(base);
      await settle(1500);
    }
    const note = `${TREE}; baseline: one \`cp -a\` of an equal tree on the disk of the home`;
    return [
      latencyRow('snapshot', snapshots, [copied], layerBar, note),
      latencyRow('rollback', rollbacks, [copied], layerBar, note),
      latencyRow('fork8', forks, [copied], forkBar, `${note}; ${FORKS} sandboxes from a warm pool`),
    ];
  } finally {
    await driver.close();
  }
}

/** The same with durable layers: fsynced to the disk of the home. The first one carries the whole tree. */
export async function durableRows(home: string, run: BenchRun): Promise<Row[]> {
  const dir = join(home, 'bench', 'sandbox');
  const rounds = run.quick ? 3 : 15;
  const driver = await BubblewrapDriver.open({ dir, warm: 0 });
  const kept: string[] = [];
  try {
    const sandbox = await driver.create(SPEC);
    await fill(sandbox);
    const copied = await copyTree(dir);
    const first = await timed(async () => {
      kept.push(await sandbox.snapshot({ durable: true }));
    });
    const snapshots: number[] = [];
    const rollbacks: number[] = [];
    for (let i = 0; i < rounds; i++) {
      await touch(sandbox, `round ${i}`);
      snapshots.push(
        await timed(async () => {
          kept.push(await sandbox.snapshot({ durable: true }));
        }),
      );
      await touch(sandbox, 'after the snapshot');
      rollbacks.push(await timed(() => sandbox.rollback(kept[0]!)));
    }
    await contentIs(sandbox, null);
    const note = `${TREE}; one file changed since the layer below; the first layer, with the whole tree: ${first.toFixed(0)} ms; baseline: one \`cp -a\` of an equal tree, without fsync`;
    return [
      latencyRow('snapshot.durable', snapshots, [copied], reported, note),
      latencyRow(
        'rollback.durable',
        rollbacks,
        [copied],
        reported,
        `${TREE}; to the layer of the whole tree; p99 ${quantile(rollbacks, 0.99).toFixed(1)} ms; baseline: as above`,
      ),
    ];
  } finally {
    for (const layer of kept.reverse()) await driver.dropLayer(layer);
    await driver.close();
  }
}
