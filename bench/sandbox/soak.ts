import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { Rng } from '../../src/core/index.ts';
import { BubblewrapDriver, type LayerId, type Sandbox } from '../../src/sandbox/index.ts';
import type { BenchRun, Row } from '../row.ts';
import { type Census, QUANTITIES, type Quantity, takeCensus, trend } from './census.ts';

const EXECUTIONS = 10_000;
const QUICK_EXECUTIONS = 1_000;
const WARM_UP = 500;
const QUICK_WARM_UP = 200;
const SAMPLES = 24;
const SIDE_BY_SIDE = 2;
const SEED = 20;
/** Layers that a worker keeps before it drops the oldest. */
const MOST_LAYERS = 6;
const TIME_OUT_MS = 60;
/** Small, so that a bomb is over soon. */
const SPEC = { memoryBytes: 64 * 2 ** 20, diskBytes: 16 * 2 ** 20, inodes: 2_000, pids: 32 };

const BOMB = 'held = []\nwhile True: held.append(bytearray(b"x" * (1 << 20)))';
const SPIN = 'while True: pass';
const WORK = `
import json, os
n = len(os.listdir("."))
with open("f%d" % (n % 40), "w") as file: json.dump(list(range(200)), file)
print("worked")
`;

class Worker {
  readonly #driver: BubblewrapDriver;
  readonly #rng: Rng;
  readonly #replaceable: boolean;
  #sandbox!: Sandbox;
  #base: LayerId = '';
  #layers: LayerId[] = [];
  executions = 0;
  /** What did not end as it must, in words. */
  readonly faults: string[] = [];

  constructor(driver: BubblewrapDriver, rng: Rng, replaceable: boolean) {
    this.#driver = driver;
    this.#rng = rng;
    this.#replaceable = replaceable;
  }

  async start(): Promise<void> {
    this.#sandbox = await this.#driver.create(SPEC);
    this.#base = await this.#sandbox.snapshot();
  }

  /** One step of the mix. A fault is noted; the worker goes on with a new sandbox. */
  async step(): Promise<void> {
    try {
      await this.#step(this.#rng.float());
    } catch (error) {
      this.faults.push((error as Error).message.slice(0, 200));
      await this.#replace();
    }
  }

  async #step(draw: number): Promise<void> {
    if (draw < 0.6) await this.#snippet(WORK, 'exited', 'worked\n');
    else if (draw < 0.78) await this.#command('echo worked; echo more >> log', 'exited');
    else if (draw < 0.84) await this.#snippet('raise ValueError("on purpose")', 'exited');
    else if (draw < 0.86) await this.#command('sleep 300 & exit 3', 'exited');
    else if (draw < 0.865) await this.#snippet(SPIN, 'timeout');
    else if (draw < 0.87) await this.#command('sleep 300 & sleep 300', 'timeout');
    else if (draw < 0.874) await this.#snippet(BOMB, 'out_of_memory');
    else if (draw < 0.92) await this.#files();
    else if (draw < 0.96) await this.#snapshot();
    else if (draw < 0.985) await this.#rollback();
    else if (draw < 0.988) await this.#durable();
    else if (draw < 0.995) await this.#fork();
    else if (this.#replaceable) await this.#replace();
  }

  async #snippet(source: string, cause: string, stdout?: string): Promise<void> {
    this.executions++;
    const timeoutMs = cause === 'timeout' ? TIME_OUT_MS : 20_000;
    const [result] = await this.#sandbox.runCode([{ language: 'python', source, timeoutMs }]);
    this.#expect(result!, cause, stdout);
  }

  async #command(script: string, cause: string): Promise<void> {
    this.executions++;
    const timeoutMs = cause === 'timeout' ? TIME_OUT_MS : 20_000;
    const result = await this.#sandbox.exec({ argv: ['sh', '-c', script], timeoutMs });
    this.#expect(result, cause);
  }

  #expect(
    result: { cause: string; code: number | null; stdout: string; stderr: string },
    cause: string,
    stdout?: string,
  ): void {
    // Without control groups an allocation fails inside instead: an ordinary exit.
    const bounded = cause === 'out_of_memory' && this.#driver.capabilities.memory !== 'cgroup';
    const right = bounded ? result.code !== 0 : result.cause === cause;
    if (!right || (stdout !== undefined && result.stdout !== stdout))
      this.faults.push(
        `expected ${cause}, got ${result.cause} ${result.code}: ${result.stderr.trim().slice(-120)}`,
      );
  }

  async #files(): Promise<void> {
    const text = String(this.#rng.float());
    await this.#sandbox.writeFile('note', text);
    const back = Buffer.from(await this.#sandbox.readFile('note')).toString();
    if (back !== text) this.faults.push(`a file held ${back} instead of ${text}`);
    await this.#sandbox.listFiles('.');
  }

  async #snapshot(): Promise<void> {
    this.#layers.push(await this.#sandbox.snapshot({ onBusy: 'stop' }));
    if (this.#layers.length > MOST_LAYERS) await this.#driver.dropLayer(this.#layers.shift()!);
  }

  async #rollback(): Promise<void> {
    await this.#sandbox.rollback(this.#layers.at(-1) ?? this.#base);
  }

  async #durable(): Promise<void> {
    const layer = await this.#sandbox.snapshot({ onBusy: 'stop', durable: true });
    await this.#sandbox.rollback(this.#base);
    await this.#driver.dropLayer(layer);
  }

  async #fork(): Promise<void> {
    const children = await this.#sandbox.fork(2);
    await Promise.all(
      children.map(async (child) => {
        this.executions++;
        this.#expect(await child.exec({ argv: ['ls'] }), 'exited');
        await child.stop();
      }),
    );
  }

  async #replace(): Promise<void> {
    await this.#dropLayers();
    await this.#driver.dropLayer(this.#base);
    await this.#sandbox.stop();
    await this.start();
  }

  async #dropLayers(): Promise<void> {
    for (const layer of this.#layers.splice(0)) await this.#driver.dropLayer(layer);
  }

  /** Back to the state of the start, so that samples compare like with like. */
  async rest(): Promise<void> {
    await this.#sandbox.rollback(this.#base);
    await this.#dropLayers();
  }
}

/**
 * A long mixed life of one driver: snippets, commands, failures, time-outs, memory bombs, leftover
 * processes, files, snapshots, rollbacks, forks, durable layers, replaced sandboxes. One worker keeps its
 * sandbox to the end, the other replaces it now and then.
 */
export async function soakRow(home: string, run: BenchRun): Promise<Row> {
  const [total, warmUp] = run.quick ? [QUICK_EXECUTIONS, QUICK_WARM_UP] : [EXECUTIONS, WARM_UP];
  mkdirSync(join(home, 'bench'), { recursive: true });
  const dir = mkdtempSync(join(home, 'bench', 'soak-'));
  const driver = await BubblewrapDriver.open({ dir, warm: 2 });
  try {
    const workers = Array.from(
      { length: SIDE_BY_SIDE },
      (_, i) => new Worker(driver, Rng.of(SEED, 'worker', i), i > 0),
    );
    await Promise.all(workers.map((worker) => worker.start()));
    const done = () => workers.reduce((sum, worker) => sum + worker.executions, 0);
    const samples: { at: number; census: Census }[] = [];
    const startedAt = performance.now();
    let measuring = 0;
    for (let i = 0; i <= SAMPLES; i++) {
      const goal = warmUp + ((total - warmUp) * i) / SAMPLES;
      await Promise.all(
        workers.map(async (worker) => {
          while (done() < goal) await worker.step();
          await worker.rest();
        }),
      );
      const from = performance.now();
      samples.push({ at: done(), census: await takeCensus(driver, dir) });
      measuring += performance.now() - from;
      const elapsed = performance.now() - startedAt;
      const rate = (1000 * done()) / (elapsed - measuring);
      const left = (elapsed / done()) * (total - done());
      run.progress(
        `soak ${done()} of ${total} executions, ${rate.toFixed(0)}/s, about ${Math.ceil(Math.max(0, left) / 1000)} s left`,
      );
    }
    return verdict(
      samples,
      workers.flatMap((worker) => worker.faults),
      done(),
    );
  } finally {
    await driver.close();
    rmSync(dir, { recursive: true, force: true });
  }
}

function verdict(
  samples: readonly { at: number; census: Census }[],
  faults: readonly string[],
  executions: number,
): Row {
  const lines: string[] = [];
  let growing = 0;
  for (const [quantity, tolerance] of Object.entries(QUANTITIES) as [Quantity, number][]) {
    const values = samples.map(({ at, census }) => ({ at, value: census[quantity] }));
    const growth = trend(values);
    const grows = growth > tolerance;
    if (grows) growing++;
    const figure = (value: number) => value.toFixed(Number.isInteger(value) ? 0 : 2);
    lines.push(
      `${grows ? 'GROWS ' : ''}${quantity}: ${figure(values[0]!.value)} at first, ${figure(values.at(-1)!.value)} at last, trend ${growth >= 0 ? '+' : ''}${figure(growth)} (tolerated ${tolerance})`,
    );
  }
  if (faults.length > 0)
    lines.push(`${faults.length} executions did not end as they must, the first: ${faults[0]}`);
  const bad = growing + (faults.length > 0 ? 1 : 0);
  return {
    name: 'soak',
    unit: 'quantities that grow',
    n: executions,
    p50: bad,
    p99: bad,
    value: bad,
    bar: 'none grows, every execution ends as it must',
    pass: bad === 0,
    note: `between ${samples[0]!.at} and ${samples.at(-1)!.at} executions, ${samples.length} samples:\n${lines.join('\n')}`,
  };
}
