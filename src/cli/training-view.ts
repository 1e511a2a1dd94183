import type { Evaluation, QuickstartProgress, QuickstartResults, Share } from '../train/index.ts';
import { duration, type Output, style } from './output.ts';

const BAR_WIDTH = 24;
/** Without a terminal a line now and then, instead of one that moves. */
const QUIET_LINE_MS = 5_000;

/** Tells a training job to a person: a moving line on a terminal, lines now and then elsewhere. */
export class TrainingView {
  readonly #output: Output;
  readonly #live = process.stderr.isTTY === true;
  #lineIsOpen = false;
  #lastLine = Number.NEGATIVE_INFINITY;
  #stageStarted = performance.now();

  constructor(output: Output) {
    this.#output = output;
  }

  show(event: QuickstartProgress): void {
    if (this.#output.json) this.#output.document(event);
    switch (event.kind) {
      case 'stage':
        this.#endLine();
        this.#stageStarted = performance.now();
        this.#output.say(`\n${style('bold', STAGES[event.stage])}  ${event.text}`);
        break;
      case 'audit':
        for (const line of event.report.lines) this.#output.say(`  ${line}`);
        break;
      case 'step':
        this.#step(event);
        break;
      case 'validation':
        this.#endLine();
        this.#output.say(
          `  step ${event.step}: solved at first try ${percent(event.first)}, greedy ${percent(event.greedy)} (validation tasks, not the held-out ones)`,
        );
        break;
      case 'evaluation':
        this.#endLine();
        this.#output.say(
          `  first try ${interval(event.evaluation.first)}, any try ${interval(event.evaluation.any)}${event.evaluation.greedy ? `, greedy ${interval(event.evaluation.greedy)}` : ''}  (${duration(event.evaluation.seconds * 1000)})`,
        );
        break;
    }
  }

  #step(event: Extract<QuickstartProgress, { kind: 'step' }>): void {
    const { step, of, values, secondsLeft } = event;
    const now = performance.now();
    if (!this.#live && step !== of && now - this.#lastLine < QUIET_LINE_MS) return;
    this.#lastLine = now;
    const filled = Math.round((BAR_WIDTH * step) / of);
    const bar = `${'█'.repeat(filled)}${'░'.repeat(BAR_WIDTH - filled)}`;
    const parts = [`${bar} ${step}/${of}`];
    if (values.reward !== undefined) parts.push(`reward ${values.reward.toFixed(2)}`);
    if (values.solved !== undefined) parts.push(`solved ${percent(values.solved)}`);
    if (values.loss !== undefined && values.reward === undefined)
      parts.push(`loss ${values.loss.toFixed(3)}`);
    const seconds = values.seconds ?? 0;
    if (values.rollouts && seconds > 0)
      parts.push(`${(values.rollouts / seconds).toFixed(0)} rollouts/s`);
    else if (values.tokens && seconds > 0)
      parts.push(`${(values.tokens / seconds / 1000).toFixed(1)}k tokens/s`);
    parts.push(`${duration(secondsLeft * 1000)} left in all`);
    const line = `  ${parts.join('  ')}`;
    if (this.#live) {
      process.stderr.write(`\r\u001b[K${line.slice(0, (process.stderr.columns ?? 100) - 1)}`);
      this.#lineIsOpen = true;
    } else {
      this.#output.say(line);
    }
    if (step === of) {
      this.#endLine();
      this.#output.say(`  done in ${duration(now - this.#stageStarted)}`);
    }
  }

  /** A line that moves must be left before anything else is said. */
  #endLine(): void {
    if (this.#lineIsOpen) process.stderr.write('\n');
    this.#lineIsOpen = false;
  }

  close(): void {
    this.#endLine();
  }
}

const STAGES = {
  audit: 'Audit',
  warmup: 'Warm-up',
  before: 'Before',
  train: 'Post-training',
  after: 'After',
  host: 'Hosting',
} as const;

function percent(share: number): string {
  return `${(100 * share).toFixed(1)} %`;
}

function interval(share: Share): string {
  return `${percent(share.value)} [${(100 * share.low).toFixed(1)}, ${(100 * share.high).toFixed(1)}]`;
}

/** Before and after, by domain and by attempt, with 95 % intervals. */
export function table(before: Evaluation, after: Evaluation): string[] {
  const measures = [
    ['first', 'first try'],
    ['any', 'any of 3'],
    ['greedy', 'greedy'],
  ] as const;
  const rows = [['tasks', 'solved by', 'before', 'after', 'change']];
  const domains: [
    string,
    Pick<Evaluation, 'first' | 'any' | 'greedy'>,
    Pick<Evaluation, 'first' | 'any' | 'greedy'>,
  ][] = [
    ['all', before, after],
    ...Object.keys(after.byDomain).map(
      (name) => [name, before.byDomain[name]!, after.byDomain[name]!] as (typeof domains)[number],
    ),
  ];
  for (const [name, was, is] of domains) {
    for (const [key, label] of measures) {
      const from = was[key];
      const to = is[key];
      if (from === undefined || to === undefined) continue;
      const change = 100 * (to.value - from.value);
      rows.push([
        key === 'first' ? `${name} (${to.count})` : '',
        label,
        interval(from),
        interval(to),
        `${change >= 0 ? '+' : ''}${change.toFixed(1)}`,
      ]);
    }
  }
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
  return rows.map((row) =>
    row
      .map((cell, column) => cell.padEnd(widths[column]!))
      .join('  ')
      .trimEnd(),
  );
}

/** A curve in a terminal: one column a bin of points, `height` lines, the axis on the left. */
export function plot(title: string, points: readonly number[], width = 64, height = 10): string[] {
  if (points.length === 0) return [];
  const columns = Math.min(width, points.length);
  const bins = Array.from({ length: columns }, (_, i) => {
    const slice = points.slice(
      Math.floor((i * points.length) / columns),
      Math.max(
        Math.floor((i * points.length) / columns) + 1,
        Math.floor(((i + 1) * points.length) / columns),
      ),
    );
    return slice.reduce((sum, value) => sum + value, 0) / slice.length;
  });
  const low = Math.min(0, ...bins);
  const high = Math.max(...bins, low + 1e-9);
  const level = (value: number) => Math.round(((value - low) / (high - low)) * (height - 1));
  const lines = Array.from({ length: height }, (_, line) => {
    const row = height - 1 - line;
    const label = (low + ((high - low) * row) / (height - 1)).toFixed(2).padStart(6);
    return `${label} │${bins.map((value) => (level(value) === row ? '●' : level(value) > row ? '·' : ' ')).join('')}`;
  });
  return [
    title,
    ...lines,
    `       └${'─'.repeat(columns)}`,
    `        step 1${`step ${points.length}`.padStart(Math.max(0, columns - 6))}`,
  ];
}

/** What a finished job measured: before and after, and the curve between. */
export function report(
  write: (line: string) => void,
  results: QuickstartResults,
  rewards: readonly number[],
): void {
  if (results.before && results.after) {
    write('');
    for (const line of table(results.before, results.after)) write(line);
    write('held-out tasks: combinations of operations never trained on; 95 % Wilson intervals');
  }
  if (rewards.length > 1) {
    write('');
    for (const line of plot('mean reward of each step', rewards)) write(line);
  }
}
