import { join } from 'node:path';
import {
  DRIVER_PROBES,
  type DriverReport,
  durableLayers,
  examineLimits,
  examineMachine,
  type LimitFinding,
  type MachineFinding,
  probeDriver,
} from '../../sandbox/index.ts';
import { printable, style } from '../output.ts';
import type { Platform } from '../platform.ts';

export interface SandboxReport {
  drivers: DriverReport[];
  /** The first driver that works: what runs get unless another is named. */
  default: string | null;
  limits: LimitFinding[];
  machine: MachineFinding[];
  orphansCleaned: number;
  durable: { count: number; bytes: number };
}

/** 0: the default driver holds every limit; 1: something is weaker; 3: there is no sandbox at all. */
export function verdictOf(report: Pick<SandboxReport, 'default' | 'limits'>): 0 | 1 | 3 {
  if (report.default === null) return 3;
  return report.limits.every(({ ok }) => ok) ? 0 : 1;
}

/** `longhaul sandbox doctor`: what this machine can enforce, found by trying it, and how to get the rest. */
export async function sandboxDoctor(platform: Platform): Promise<number> {
  const { output } = platform;
  const dir = join(platform.home, 'sandbox');
  const report: SandboxReport = {
    drivers: [],
    default: null,
    limits: [],
    machine: [],
    orphansCleaned: 0,
    durable: durableLayers(dir),
  };
  for (const entry of DRIVER_PROBES) {
    report.drivers.push(
      await probeDriver(entry, dir, async (opened) => {
        report.orphansCleaned += opened.orphansCleaned ?? 0;
        if (report.default !== null || !entry.automatic) return;
        report.default = entry.name;
        report.limits = await examineLimits(opened);
        report.machine = examineMachine(opened.driver.capabilities);
      }),
    );
  }
  const code = verdictOf(report);
  print(platform, report, code);
  output.document({ ...report, verdict: code });
  return code;
}

type Mark = 'ok' | 'weak' | 'no';
const COLOURS = { ok: 'green', weak: 'yellow', no: 'red' } as const;

function print({ output }: Platform, report: SandboxReport, code: 0 | 1 | 3): void {
  const line = (mark: Mark, columns: [text: string, width: number][], next?: string) => {
    const cells = columns.map(([text, width]) => printable(text).padEnd(width)).join('  ');
    output.print(`  ${style(COLOURS[mark], mark.padEnd(4))}  ${cells.trimEnd()}`);
    if (next) output.print(`        ${style('dim', `next: ${printable(next)}`)}`);
  };
  const title = (text: string) => output.print(style('bold', text));

  title('drivers');
  for (const driver of report.drivers) {
    if (driver.ok)
      line('ok', [
        [driver.name, 10],
        [describe(driver), 0],
      ]);
    else
      line(
        'no',
        [
          [driver.name, 10],
          [driver.reason, 0],
        ],
        driver.next,
      );
  }
  if (report.default !== null) {
    output.print();
    title(`limits of ${report.default}, the default, each tried`);
    for (const { part, ok, how, found, next } of report.limits)
      line(
        ok ? 'ok' : 'weak',
        [
          [part, 10],
          [how, 16],
          [found, 0],
        ],
        next,
      );
    output.print();
    title('machine');
    for (const { part, ok, found, next } of report.machine)
      line(
        ok ? 'ok' : 'weak',
        [
          [part, 16],
          [found, 0],
        ],
        next,
      );
    const { count, bytes } = report.durable;
    line('ok', [
      ['durable layers', 16],
      [`${count}, ${(bytes / 2 ** 20).toFixed(1)} MiB`, 0],
    ]);
    line('ok', [
      ['orphans', 16],
      [
        report.orphansCleaned === 0
          ? 'no crashed owner left anything'
          : `leftovers of ${report.orphansCleaned} crashed owners removed now`,
        0,
      ],
    ]);
  }
  output.print();
  output.print(
    {
      0: `${report.default} holds every limit here.`,
      1: `${report.default} works, and something above is weaker than it can be.`,
      3: 'No sandbox works here: nothing that a model wrote can be run.',
    }[code],
  );
}

function describe({ capabilities, firstMs }: Extract<DriverReport, { ok: true }>): string {
  const { isolation, exec, languages, layers } = capabilities;
  const runs = [...(exec ? ['commands'] : []), ...languages];
  return `${isolation.padEnd(10)}  ${runs.join(', ')}; layers: ${layers}; a first result after ${Math.round(firstMs)} ms`;
}
