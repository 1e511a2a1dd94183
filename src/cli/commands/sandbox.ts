import { constants as osConstants } from 'node:os';
import { type ExecResult, LonghaulError } from '../../core/index.ts';
import type {
  NetworkAttempt,
  NetworkRule,
  Sandbox,
  SandboxDriver,
  SandboxSpec,
} from '../../sandbox/contract.ts';
import type { OpenedSandboxes } from '../../sandbox/index.ts';
import { specImage } from '../images.ts';
import { duration, printable } from '../output.ts';
import { imagesOf, type Platform } from '../platform.ts';
import { GuestOutput } from '../terminal.ts';

export interface ExecOptions {
  image?: string;
  memory?: number;
  cpus?: number;
  pids?: number;
  disk?: number;
  timeout: number;
  allow?: NetworkRule[];
  python?: string;
  stdin?: boolean;
}

/** As `timeout(1)` has it. */
const TIMED_OUT = 124;
const { signals } = osConstants;

/** Most of what is read ahead where standard input cannot be passed on as it comes. */
const MOST_STDIN_BYTES = 64 * 2 ** 20;

/** A guest may try a thousand addresses; a person reads the first ones. */
const MOST_ATTEMPTS_SAID = 8;

function specOf(options: ExecOptions, image: string | undefined): Partial<SandboxSpec> {
  const { memory, cpus, pids, disk, allow } = options;
  return {
    ...(image !== undefined && { image }),
    ...(memory !== undefined && { memoryBytes: memory }),
    ...(cpus !== undefined && { cpus }),
    ...(pids !== undefined && { pids }),
    ...(disk !== undefined && { diskBytes: disk }),
    ...(allow !== undefined && { network: { allow } }),
  };
}

/** What a shell would say: the code, 128 + the signal's number, 124 for a time-out. */
export function exitCodeOf(result: Pick<ExecResult, 'cause' | 'code' | 'signal'>): number {
  if (result.cause === 'timeout') return TIMED_OUT;
  if (result.code !== null) return result.code;
  return 128 + (signals[result.signal as NodeJS.Signals] ?? signals.SIGKILL);
}

/**
 * `longhaul sandbox exec [options] -- ARGV`: one command, or a Python snippet, in a sandbox of its own.
 * Output comes as it is made; the exit code is the command's.
 */
export async function exec(
  platform: Platform,
  argv: readonly string[],
  options: ExecOptions,
): Promise<number> {
  if (argv.length > 0 === (options.python !== undefined))
    throw new LonghaulError(
      'ConfigInvalid',
      argv.length > 0 ? 'a command and --python exclude each other' : 'there is no command to run',
      { next: 'For example `longhaul sandbox exec -- ls -l`, or --python "print(1)".' },
    );
  const interruption = new Interruption();
  try {
    return await execUntil(interruption, platform, argv, options);
  } finally {
    interruption.end();
  }
}

async function execUntil(
  interruption: Interruption,
  platform: Platform,
  argv: readonly string[],
  options: ExecOptions,
): Promise<number> {
  const { output } = platform;
  const opened = await platform.openSandboxes(0);
  const { driver } = opened;
  platform.closeLater(() => driver.close());
  if (opened.reason !== null) {
    output.say(printable(opened.saidAloud));
    refuseWhatOnlyBubblewrapRuns(opened, options);
  }
  const { image, allow = [] } = options;
  const { signal } = interruption;
  const store = () => imagesOf(driver, opened);
  let named: string | undefined;
  try {
    named = image && (await specImage(image, { output, store, allow, signal }));
  } catch (error) {
    const { exitCode } = interruption;
    if (exitCode === null) throw error;
    output.document({ driver: driver.name, exitCode, result: null });
    return exitCode;
  }
  const sandbox = await driver.create(specOf(options, named));
  const { isolation } = driver.capabilities;
  const about = { driver: driver.name, isolation, spec: sandbox.spec };
  try {
    interruption.signal.throwIfAborted();
    const result = await run(driver, sandbox, argv, options, interruption.signal, output.json);
    explain(platform, result, options, sandbox.networkAttempts());
    const exitCode = interruption.exitCode ?? exitCodeOf(result);
    output.document({
      ...about,
      exitCode,
      result,
      usage: await sandbox.usage(),
      networkAttempts: sandbox.networkAttempts(),
    });
    return exitCode;
  } catch (error) {
    const { exitCode } = interruption;
    if (exitCode === null) throw error;
    output.document({ ...about, exitCode, result: null });
    return exitCode;
  } finally {
    await sandbox.stop();
  }
}

/** Without bubblewrap a weaker driver may still run something; what it cannot run is the machine's lack, not the user's mistake. */
function refuseWhatOnlyBubblewrapRuns(
  { driver, reason, next }: OpenedSandboxes,
  { python }: ExecOptions,
): void {
  const { exec: commands, languages } = driver.capabilities;
  if (python === undefined ? commands : languages.includes('python')) return;
  const what = python === undefined ? 'commands' : 'Python';
  throw new LonghaulError('SandboxUnavailable', `${driver.name} runs no ${what}; ${reason}`, {
    ...(next !== null && { next }),
  });
}

async function run(
  driver: SandboxDriver,
  sandbox: Sandbox,
  argv: readonly string[],
  options: ExecOptions,
  signal: AbortSignal,
  json: boolean,
): Promise<ExecResult> {
  const timeoutMs = options.timeout;
  const stdout = new GuestOutput(process.stdout);
  const stderr = new GuestOutput(process.stderr);
  try {
    if (options.python !== undefined) {
      // A snippet has no end of its own that could be asked for.
      signal.addEventListener('abort', () => void sandbox.stop(), { once: true });
      const stdin = options.stdin ? { stdin: (await readStdin()).toString() } : {};
      const [result] = await sandbox.runCode([
        { language: 'python', source: options.python, timeoutMs, ...stdin },
      ]);
      if (!json) {
        stdout.write(Buffer.from(result!.stdout));
        stderr.write(Buffer.from(result!.stderr));
      }
      return result!;
    }
    const onOutput = (stream: 'stdout' | 'stderr', chunk: Uint8Array) =>
      (stream === 'stdout' ? stdout : stderr).write(chunk);
    const request = { argv, timeoutMs, signal, ...(!json && { onOutput }) };
    if (!options.stdin) return await sandbox.exec(request);
    if (!driver.capabilities.processes)
      return await sandbox.exec({ ...request, stdin: await readStdin() });
    const child = await sandbox.start(request);
    const feeding = feed(
      (data) => child.write(data),
      () => child.end(),
    );
    const result = await child.exited;
    process.stdin.destroy();
    await feeding;
    return result;
  } finally {
    stdout.end();
    stderr.end();
  }
}

/** Standard input as it comes, until its end or until the process no longer reads. */
async function feed(
  write: (data: Uint8Array) => Promise<void>,
  end: () => Promise<void>,
): Promise<void> {
  try {
    for await (const chunk of process.stdin) await write(chunk as Buffer);
    await end();
  } catch (error) {
    const early = (error as NodeJS.ErrnoException).code === 'ERR_STREAM_PREMATURE_CLOSE';
    const unread = error instanceof LonghaulError && error.code === 'FileRefused';
    const gone = error instanceof LonghaulError && error.code === 'SandboxBroken';
    // A broken sandbox is told by the process's own end.
    if (!early && !unread && !gone) throw error;
  }
}

async function readStdin(): Promise<Buffer> {
  const chunks: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of process.stdin) {
    chunks.push(chunk as Buffer);
    bytes += (chunk as Buffer).length;
    if (bytes > MOST_STDIN_BYTES)
      throw new LonghaulError(
        'ConfigInvalid',
        `standard input is more than ${MOST_STDIN_BYTES} bytes`,
        {
          next: 'Give less, or run a command that reads it as it comes.',
        },
      );
  }
  return Buffer.concat(chunks);
}

/** Why a command did not simply end, for people. What the guest chose (host names) is made harmless. */
function explain(
  { output }: Platform,
  result: ExecResult,
  options: ExecOptions,
  attempts: readonly NetworkAttempt[],
): void {
  const { cause, signal, limitsHit = [] } = result;
  if (cause === 'timeout')
    output.say(`sandbox: ran past ${duration(options.timeout)} and was killed (--timeout)`);
  else if (cause === 'out_of_memory')
    output.say('sandbox: ran out of memory and was killed (--memory)');
  else if (cause === 'output_limit') output.say('sandbox: wrote too much output and was killed');
  else if (cause === 'signalled') output.say(`sandbox: ended by ${signal}`);
  for (const limit of limitsHit.filter((each) => each !== 'memory' || cause !== 'out_of_memory'))
    output.say(
      `sandbox: met its limit of ${limit === 'pids' ? 'processes (--pids)' : 'memory (--memory)'}`,
    );
  const failed = attempts.filter(({ outcome }) => outcome !== 'allowed');
  const said = new Set(
    failed.map(
      ({ host, port, outcome, detail }) => `network: ${host}:${port} ${outcome}: ${detail}`,
    ),
  );
  for (const line of [...said].slice(0, MOST_ATTEMPTS_SAID)) output.say(printable(line));
  if (said.size > MOST_ATTEMPTS_SAID)
    output.say(`network: ${said.size - MOST_ATTEMPTS_SAID} more; --json has them all`);
}

/**
 * Ends the command when the user interrupts, the caller terminates this process, or nobody reads its
 * output any more. A second interrupt ends this process as usual.
 */
class Interruption {
  exitCode: number | null = null;
  readonly #controller = new AbortController();
  readonly #interrupted = () => this.#end(128 + signals.SIGINT);
  readonly #terminated = () => this.#end(128 + signals.SIGTERM);
  readonly #unread = (error: NodeJS.ErrnoException) => {
    if (error.code === 'EPIPE') this.#end(128 + signals.SIGPIPE);
  };

  constructor() {
    process.once('SIGINT', this.#interrupted);
    process.once('SIGTERM', this.#terminated);
    process.stdout.on('error', this.#unread);
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  #end(exitCode: number): void {
    this.exitCode ??= exitCode;
    process.stdin.destroy();
    this.#controller.abort();
  }

  end(): void {
    process.off('SIGINT', this.#interrupted);
    process.off('SIGTERM', this.#terminated);
    process.stdout.off('error', this.#unread);
  }
}
