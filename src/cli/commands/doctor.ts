import { statfsSync } from 'node:fs';
import { availableParallelism, freemem, totalmem } from 'node:os';
import { attribute } from '../../core/index.ts';
import { embeddedStatus, stopEmbedded } from '../../store/index.ts';
import { style } from '../output.ts';
import type { Platform } from '../platform.ts';

interface Finding {
  part: string;
  ok: boolean;
  found: string;
  next?: string;
}

/** `longhaul doctor`: each part is tried, not looked for. Exit code 3 when one that is always needed fails. */
export async function doctor(
  platform: Platform,
  options: { stopStore?: boolean },
): Promise<number> {
  const { output, home } = platform;
  if (options.stopStore) {
    const stopped = await stopEmbedded(home);
    output.say(stopped ? 'the embedded Postgres is stopped' : 'no embedded Postgres was running');
    output.document({ stopped });
    return 0;
  }
  const findings = [
    machine(home),
    await store(platform),
    await sandbox(platform),
    await engine(platform),
  ];
  for (const { part, ok, found, next } of findings) {
    output.print(`${style(ok ? 'green' : 'red', ok ? 'ok  ' : 'FAIL')}  ${part.padEnd(9)}${found}`);
    if (next) output.print(`                next: ${next}`);
  }
  output.document({ findings });
  return findings.every((finding) => finding.ok) ? 0 : 3;
}

function machine(home: string): Finding {
  const disk = statfsSync(home);
  const freeDisk = (disk.bavail * disk.bsize) / 2 ** 30;
  const found = `${availableParallelism()} cores, ${(freemem() / 2 ** 30).toFixed(1)} of ${(totalmem() / 2 ** 30).toFixed(1)} GiB memory free, ${freeDisk.toFixed(1)} GiB disk free, Node ${process.versions.node}`;
  return freeDisk > 0.5
    ? { part: 'machine', ok: true, found }
    : { part: 'machine', ok: false, found, next: 'Free at least 0.5 GiB of disk.' };
}

/** A part that works, or the error that says why not. */
async function tried(part: string, work: () => Promise<string>): Promise<Finding> {
  try {
    return { part, ok: true, found: await work() };
  } catch (thrown) {
    const error = attribute(thrown, 'Internal');
    return { part, ok: false, found: error.message, next: error.next };
  }
}

function store(platform: Platform): Promise<Finding> {
  return tried('store', async () => {
    const { log } = await platform.store();
    const newest = await log.list({ limit: 1 });
    const runs = newest.length === 0 ? 'no runs yet' : `newest run ${newest[0]?.runId}`;
    if (process.env.DATABASE_URL) return `Postgres at DATABASE_URL, ${runs}`;
    const status = await embeddedStatus(platform.home);
    return `embedded Postgres ${status.version}, process ${status.pid}, ${runs}`;
  });
}

function sandbox(platform: Platform): Promise<Finding> {
  return tried('sandbox', async () => {
    const driver = await platform.sandboxes();
    const sandbox = await driver.create();
    try {
      const [language = 'python'] = driver.capabilities.languages;
      const source = language === 'python' ? 'print(6*7)' : 'console.log(6*7)';
      const startedAt = performance.now();
      const [result] = await sandbox.runCode([{ language, source }]);
      if (result?.stdout.trim() !== '42')
        throw new Error(`a ${language} snippet gave ${JSON.stringify(result)}`);
      const shortfall = platform.sandboxShortfall;
      const instead = shortfall === null ? '' : `; ${shortfall.reason} (${shortfall.next})`;
      const { memory, cpu, pids, disk, layers, isolation } = driver.capabilities;
      return `${driver.name}: a ${language} snippet took ${(performance.now() - startedAt).toFixed(1)} ms; isolation ${isolation}, limits: memory ${memory}, cpu ${cpu}, pids ${pids}, disk ${disk}, layers ${layers}${instead}`;
    } finally {
      await sandbox.stop();
    }
  });
}

function engine(platform: Platform): Promise<Finding> {
  return tried('engine', async () => {
    const trainer = await platform.engine().createTrainer({
      config: {
        vocabSize: 8,
        dim: 8,
        layers: 1,
        heads: 1,
        kvHeads: 1,
        ffnDim: 16,
        maxLength: 16,
        ropeTheta: 10_000,
        normEps: 1e-5,
        tiedHead: true,
      },
      seed: 0,
    });
    const { lossSum } = await trainer.forwardBackward(
      [
        {
          tokens: Int32Array.of(1, 2),
          targets: Int32Array.of(2, 3),
          weights: Float32Array.of(1, 1),
        },
      ],
      { kind: 'cross_entropy' },
    );
    await trainer.optimStep({ learningRate: 1e-3 });
    await trainer.close();
    return `ONNX Runtime trains (loss ${lossSum.toFixed(3)} of a first tiny step)`;
  });
}
