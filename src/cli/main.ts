import { readFileSync } from 'node:fs';
import { Command, CommanderError, InvalidArgumentError, Option } from 'commander';
import { attribute, LonghaulError, RunKind, RunStatus } from '../core/index.ts';
import { SANDBOX_DRIVERS, type SandboxDriverName } from '../sandbox/contract.ts';
import * as sandboxOptions from './commands/sandbox-options.ts';
import { Output } from './output.ts';
import { Platform } from './platform.ts';

/** Leaves a margin to ten minutes on a loaded machine. */
const DEFAULT_MINUTES = 6;

const EXEC_HELP = `
Exit code: the command's; 128 + n when signal n ended it; 124 when it ran out of time; 127 when it does
not exist inside; 2 for wrong usage and 3 when this machine gives no sandbox. A command that ends with 2
or 3 itself is told apart by --json.
`;

/** Exit codes: 0 done, 1 the work failed, 2 wrong usage, 3 environment or infrastructure. */
export async function main(argv: readonly string[]): Promise<void> {
  surviveClosedPipes();
  const program = build();
  try {
    if (argv.length === 0) {
      program.outputHelp();
      return;
    }
    await program.parseAsync(argv as string[], { from: 'user' });
  } catch (thrown) {
    process.exitCode = report(thrown, beforeCommand(argv).includes('--json'));
  }
}

/** What is ours of a command line: after `--` comes somebody else's. */
function beforeCommand(argv: readonly string[]): readonly string[] {
  const end = argv.indexOf('--');
  return end < 0 ? argv : argv.slice(0, end);
}

/** `longhaul show | head` ends quietly, and a run goes on when nobody reads what it says. */
function surviveClosedPipes(): void {
  for (const stream of [process.stdout, process.stderr]) stream.on('error', () => {});
}

function report(thrown: unknown, json: boolean): number {
  if (thrown instanceof CommanderError) {
    if (thrown.exitCode === 0) return 0;
    const next = 'See `longhaul help` or `longhaul help COMMAND`.';
    new Output(json).document({
      error: new LonghaulError('ConfigInvalid', thrown.message, { next }).toJSON(),
    });
    return 2;
  }
  const error = attribute(thrown, 'Internal');
  new Output(json).fail(error);
  if (error.code === 'Internal' && process.env.LONGHAUL_DEBUG) console.error(thrown);
  return exitCode(error);
}

function exitCode(error: LonghaulError): number {
  if (error.class === 'usage') return error.code === 'StoreReadOnly' ? 3 : 2;
  if (error.class === 'retryable' || error.code === 'DiskFull') return 3;
  return 1;
}

function build(): Command {
  const program = new Command('longhaul')
    .description('Hosts long-horizon agents and post-trains the models behind them.')
    .version(version(), '--version')
    .option('--home <dir>', 'where runs, weights and the store live', folder, '.longhaul')
    .option('--json', 'documents for programs on stdout, words on stderr', false)
    .addOption(
      new Option('--sandbox <driver>', 'sandbox driver to use or fail (see `sandbox doctor`)')
        .choices(SANDBOX_DRIVERS)
        .env('LONGHAUL_SANDBOX'),
    )
    .showSuggestionAfterError()
    .exitOverride()
    .configureHelp({ showGlobalOptions: true, sortSubcommands: false });

  /** Runs a command with its platform; sets the exit code; closes whatever happened. */
  const command = (work: (platform: Platform, args: string[], options: never) => Promise<number>) =>
    async function action(this: Command): Promise<void> {
      const globals = program.opts<{ home: string; json: boolean; sandbox?: SandboxDriverName }>();
      const platform = new Platform(globals.home, new Output(globals.json), globals.sandbox);
      try {
        process.exitCode = await work(platform, this.args, this.opts() as never);
      } finally {
        await platform.close();
      }
    };

  const seed = new Option('--seed <n>', 'seed of everything that is drawn')
    .argParser(whole)
    .default(0);
  const minutes = new Option(
    '--minutes <n>',
    'time budget on two cores; it chooses the number of steps',
  )
    .argParser(number)
    .default(DEFAULT_MINUTES);
  const control = new Option(
    '--control <name>',
    'what takes the place of the true reward, to see what it is worth',
  ).choices(['random-reward', 'supervised', 'shuffled-feedback']);

  program
    .command('quickstart')
    .description('post-train a small agent on this machine and host it (what `npm start` does)')
    .addOption(seed)
    .addOption(minutes)
    .addOption(control)
    .action(
      command(async (platform, _, options) =>
        (await import('./commands/train.ts')).quickstart(platform, options),
      ),
    );

  program
    .command('run')
    .description(
      'host an agent on a coding task (a directory in Harbor format) until it is done and graded',
    )
    .argument('<task-dir>', 'instruction.md, task.toml, environment/, tests/')
    .requiredOption(
      '--model <provider/model>',
      'for example openai-compatible/qwen3 or anthropic/claude-opus-5',
    )
    .option('--base-url <url>', 'an OpenAI-compatible endpoint')
    .option('--seed <n>', 'seed of everything that is drawn', whole, 0)
    .option('--model-calls <n>', 'pause after this many', positive, 60)
    .option('--tool-calls <n>', 'pause after this many', positive)
    .option('--minutes <n>', 'pause after this much working time', number)
    .option(
      '--allow <host[:port]>',
      'let the task and its image build reach this; may be repeated',
      sandboxOptions.several(sandboxOptions.networkRule),
    )
    .action(
      command(async (platform, [dir = ''], options) =>
        (await import('./commands/run.ts')).run(platform, dir, options),
      ),
    );

  program
    .command('runs')
    .description('list runs, the newest first')
    .addOption(new Option('--kind <kind>').choices(RunKind.options))
    .addOption(new Option('--status <status>').choices(RunStatus.options))
    .option('--limit <n>', 'how many', positive, 20)
    .action(
      command(async (platform, _, options) =>
        (await import('./commands/runs.ts')).runs(platform, options),
      ),
    );

  program
    .command('show')
    .description(
      'tell a run (attempts, observations, reward, where its tokens came from) or a training job',
    )
    .argument('<run>', 'run id, its beginning or end, or `last`; or a job id or its end')
    .option('--follow', 'stay and tell what happens next')
    .action(
      command(async (platform, [run = ''], options) =>
        (await import('./commands/show.ts')).show(platform, run, options),
      ),
    );

  program
    .command('resume')
    .description('go on with a run after a crash or a pause; finished steps are not repeated')
    .argument('<run>', 'id, its beginning or end, or `last`')
    .addOption(
      new Option('--answer <answer>', 'how the call that nobody knows of ended').choices([
        'done',
        'repeat',
      ]),
    )
    .option('--model-calls <n>', 'new limit', positive)
    .option('--tool-calls <n>', 'new limit', positive)
    .option('--minutes <n>', 'new limit', number)
    .option('--model <provider/model>', 'go on with another model')
    .option('--base-url <url>', 'where the model is served now')
    .action(
      command(async (platform, [run = ''], options) =>
        (await import('./commands/steer.ts')).resume(platform, run, options),
      ),
    );

  program
    .command('fork')
    .description('start a new run from the end of a step of another, workspace included')
    .argument('<run>', 'id, its beginning or end, or `last`')
    .requiredOption('--at <step>', 'finished step to fork after; 0 is before the first', whole)
    .option('--message <text>', 'a further message to the agent')
    .option('--model <provider/model>', 'another model')
    .option('--base-url <url>', 'its endpoint')
    .option('--seed <n>', 'another seed', whole)
    .option('--no-start', 'only create it')
    .action(
      command(async (platform, [run = ''], options) =>
        (await import('./commands/steer.ts')).fork(platform, run, options),
      ),
    );

  program
    .command('stop')
    .description('end a run for good')
    .argument('<run>', 'id, its beginning or end, or `last`')
    .option('--reason <text>', 'kept in the log', 'stopped by a person')
    .action(
      command(async (platform, [run = ''], options) =>
        (await import('./commands/steer.ts')).stop(platform, run, options),
      ),
    );

  program
    .command('train')
    .description(
      'the training job of the quickstart alone; `--resume` goes on with an interrupted one',
    )
    .addOption(seed)
    .addOption(minutes)
    .addOption(control)
    .option('--resume [job]', 'a job id, its end, or the newest')
    .action(
      command(async (platform, _, options: TrainFlags) =>
        (await import('./commands/train.ts')).train(platform, {
          ...options,
          ...(options.resume === true ? { resume: 'last' } : {}),
        } as never),
      ),
    );

  const sandbox = program
    .command('sandbox')
    .description(
      'run one command in a sandbox of this machine, or see what sandboxes can hold here',
    );

  sandbox
    .command('exec')
    .description('run a command in a sandbox of its own; the exit code is the command’s')
    .argument('[argv...]', 'after `--`: the command and its arguments')
    .option(
      '--image <image>',
      'root file system: host, a directory (with a Dockerfile it is built), an image archive, or the name of an image',
      sandboxOptions.image,
    )
    .option('--memory <size>', 'for example 512m', sandboxOptions.size)
    .option('--cpus <n>', 'cores, for example 0.5', sandboxOptions.cores)
    .option('--pids <n>', 'processes at once', sandboxOptions.count)
    .option('--disk <size>', 'files of workspace and /tmp together', sandboxOptions.size)
    .option(
      '--timeout <time>',
      'for example 30s; then the whole tree is killed',
      sandboxOptions.duration,
      60_000,
    )
    .option(
      '--allow <host[:port]>',
      'let this through to the network; may be repeated',
      sandboxOptions.several(sandboxOptions.networkRule),
    )
    .option('--python <code>', 'a Python snippet instead of a command; its output comes at its end')
    .option('--stdin', 'pass standard input on')
    .addHelpText('after', EXEC_HELP)
    .action(
      command(async (platform, argv, options) =>
        (await import('./commands/sandbox.ts')).exec(platform, argv, options),
      ),
    );

  sandbox
    .command('doctor')
    .description('try what this machine can enforce on a sandbox, and say how to get the rest')
    .action(
      command(async (platform) =>
        (await import('./commands/sandbox-doctor.ts')).sandboxDoctor(platform),
      ),
    );

  program
    .command('doctor')
    .description('what this machine can do, what it lacks, and how to get it')
    .option('--stop-store', 'end the embedded Postgres of this home')
    .action(
      command(async (platform, _, options) =>
        (await import('./commands/doctor.ts')).doctor(platform, options),
      ),
    );

  program
    .command('bench')
    .description('measure figures against their bars')
    .argument('<room>', 'skeleton, engine, sandbox or quickstart')
    .argument('[row]', 'one row of it')
    .option('--quick', 'fewer measurements where a row allows it; its bars are not meant for that')
    .action(
      command(async (platform, [room = '', row], options) =>
        (await import('./commands/bench.ts')).bench(platform, room, row, options),
      ),
    );

  return program;
}

interface TrainFlags {
  resume?: string | true;
}

function version(): string {
  for (const path of ['../../package.json', '../../../package.json']) {
    try {
      return (
        JSON.parse(readFileSync(new URL(path, import.meta.url), 'utf8')) as { version: string }
      ).version;
    } catch {}
  }
  return 'unknown';
}

function folder(text: string): string {
  if (text.trim() === '') throw new InvalidArgumentError('a folder is expected');
  return text;
}

/** Minutes: more than a year is a mistake. */
function number(text: string): number {
  const value = Number(text);
  if (!(value > 0 && value <= 525_600)) {
    throw new InvalidArgumentError('a number above 0 and up to 525600 is expected');
  }
  return value;
}

function whole(text: string): number {
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < 0)
    throw new InvalidArgumentError('a whole number is expected');
  return value;
}

function positive(text: string): number {
  if (whole(text) === 0) throw new InvalidArgumentError('a number above 0 is expected');
  return whole(text);
}
