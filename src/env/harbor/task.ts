import { realpath, stat } from 'node:fs/promises';
import { basename, join, posix } from 'node:path';
import { TextDecoder } from 'node:util';
import { LonghaulError } from '../../core/index.ts';
import type { NetworkRule, SandboxSpec } from '../../sandbox/contract.ts';
import type { Split } from '../contract.ts';
import { type BundleEntry, hashBundle, readWhole, scanPart } from './bundle.ts';
import { expandEnv, parseTaskToml, type TaskToml } from './config.ts';
import { type CopyStep, type ImagePlan, readDockerfile, WORKSPACE } from './dockerfile.ts';
import { notSupported, taskInvalid } from './invalid.ts';
import { requireNetwork } from './network.ts';
import type { Placed } from './pack.ts';
import { splitOf } from './split.ts';

/** A task directory, read and checked. Contents of files stay on disk, bound by their hashes. */
export interface HarborTask {
  /** Absolute, links resolved. */
  dir: string;
  name: string;
  domain: string;
  split: Split;
  difficulty: string | null;
  instruction: string;
  /** Hex SHA-256 of the bundle: what a result is bound to. */
  hash: string;
  /** Where commands of the agent and the verifier start: inside the workspace, or as the image says. */
  workdir: string;
  /** What the agent finds, by path relative to the workspace. Empty where an image holds it. */
  workspace: Placed[];
  /** The sandbox's whole root is an image of the task's own, which the agent can change. */
  ownRoot: boolean;
  tests: Placed[];
  /** The reference solution, if the task brings one. */
  solution: Placed[] | null;
  solutionEnv: Record<string, string>;
  verifier: { timeoutMs: number; env: Record<string, string> };
  /** Wall clock the author grants the agent; null where the task says nothing. */
  agentTimeoutMs: number | null;
  rewardRange: readonly [number, number];
  sandbox: Partial<SandboxSpec>;
  /** What was read and is not followed: unknown keys, a base image. For the user to see, one line each. */
  notes: string[];
}

/** An image that sandboxes of a task start as. */
export interface TaskImage {
  /** For `SandboxSpec.image`. Its digest is part of the task's hash. */
  image: `rootfs:${string}`;
  /** Where commands start in it. */
  workdir: string;
  /** What was read and is not followed, one line each. */
  notes: readonly string[];
}

export interface BuildRequest {
  /** Absolute. */
  context: string;
  /** Relative to the context. */
  dockerfile: string;
  /** Wall clock of one RUN. */
  runTimeoutMs: number;
  /** What RUN may reach; empty: nothing. */
  allow: readonly NetworkRule[];
}

export interface LoadOptions {
  /** Values for `${NAME}` in the task's `env` tables. Nothing else of the process's environment is read. */
  allowEnv?: Readonly<Record<string, string>>;
  /**
   * Builds an image, or finds it built. Called only for Dockerfiles that need it; without it such a task
   * is `CapabilityMissing`. What it throws is passed on.
   */
  buildImage?(request: BuildRequest): Promise<TaskImage>;
  /** The image that a name (`docker_image`) stands for. `NotFound` where there is none. */
  resolveImage?(name: string): Promise<TaskImage>;
  /** What the user lets the task reach. Without it a task that asks for a network is refused. */
  allow?: readonly NetworkRule[];
}

const INSTRUCTION_BYTES = 256 * 1024;
const TOML_BYTES = 256 * 1024;
const DEFAULT_VERIFIER_SEC = 600;
const DEFAULT_BUILD_SEC = 600;
const MIB = 1024 * 1024;

/**
 * Reads a Harbor task directory. `TaskInvalid` with file, key and what is expected for a directory
 * that breaks the format; `CapabilityMissing` for what the format allows and this version cannot give.
 */
export async function loadHarborTask(dir: string, options: LoadOptions = {}): Promise<HarborTask> {
  try {
    return await load(dir, options);
  } catch (thrown) {
    if (thrown instanceof LonghaulError) throw thrown;
    const { code, path, message } = thrown as NodeJS.ErrnoException;
    if (code === undefined) throw thrown;
    throw new LonghaulError('TaskInvalid', `${path ?? dir}: cannot be read: ${message}`, {
      cause: thrown,
    });
  }
}

async function load(given: string, options: LoadOptions): Promise<HarborTask> {
  const { allowEnv = {}, allow = [] } = options;
  const info = await stat(given).catch(() => null);
  if (info === null) throw taskInvalid(given, null, 'no such task directory');
  if (!info.isDirectory())
    throw taskInvalid(given, null, 'expected a directory with instruction.md and task.toml');
  const dir = await realpath(given);

  const instructionFile = join(dir, 'instruction.md');
  const instruction = await readText(instructionFile, INSTRUCTION_BYTES, 'the task in words');
  if (instruction.trim() === '')
    throw taskInvalid(instructionFile, null, 'expected the task in words, the file is empty');
  const tomlFile = join(dir, 'task.toml');
  const toml = await readText(tomlFile, TOML_BYTES, 'the settings of the task (docs/tasks.md)');
  const { config, unknown } = parseTaskToml(toml, tomlFile);
  requireSupported(config, tomlFile);
  const networkNotes = requireNetwork(config, allow, tomlFile);

  const testsRoot = join(dir, 'tests');
  const tests = await scanPart(dir, 'tests');
  if (tests?.find((entry) => entry.path === 'test.sh')?.kind !== 'file')
    throw taskInvalid(join(testsRoot, 'test.sh'), null, 'expected the script that grades the task');
  const environment = (await scanPart(dir, 'environment')) ?? [];
  const solution = await scanPart(dir, 'solution');
  if (solution && solution.find((entry) => entry.path === 'solve.sh')?.kind !== 'file')
    throw taskInvalid(
      join(dir, 'solution/solve.sh'),
      null,
      'expected the script that solves the task',
    );

  const image = await readImage({ dir, entries: environment, config, tomlFile, options });
  const name = config.task?.name ?? basename(dir);
  return {
    dir,
    name,
    domain: config.metadata?.category ?? 'harbor',
    split: config.metadata?.split ?? splitOf(name),
    difficulty: config.metadata?.difficulty ?? null,
    instruction: instruction.trim(),
    hash: hashBundle(
      {
        'instruction.md': instruction,
        'task.toml': toml,
        ...(image.image && { image: image.image }),
      },
      { environment, tests, ...(solution && { solution }) },
    ),
    workdir: image.workdir,
    workspace: image.placed,
    ownRoot: image.image !== null,
    tests: place(testsRoot, tests),
    solution: solution && place(join(dir, 'solution'), solution),
    solutionEnv: expandEnv(config.solution?.env ?? {}, allowEnv, tomlFile, 'solution.env'),
    verifier: {
      timeoutMs: (config.verifier?.timeout_sec ?? DEFAULT_VERIFIER_SEC) * 1000,
      env: expandEnv(config.verifier?.env ?? {}, allowEnv, tomlFile, 'verifier.env'),
    },
    agentTimeoutMs: config.agent?.timeout_sec ? config.agent.timeout_sec * 1000 : null,
    rewardRange: config.metadata?.reward_range ?? ([0, 1] as const),
    sandbox: sandboxSpec(config, image.image, allow),
    notes: [
      ...unknown.map((key) => `${tomlFile}: ${key}: not a key of the format, not used`),
      ...ignoredKeys(config, environment).map((key) => `${tomlFile}: ${key}: not used`),
      ...networkNotes,
      ...image.notes,
    ],
  };
}

async function readText(file: string, limit: number, expected: string): Promise<string> {
  let bytes: Buffer;
  try {
    bytes = await readWhole(file, limit);
  } catch (thrown) {
    if ((thrown as NodeJS.ErrnoException).code === 'ENOENT')
      throw taskInvalid(file, null, `missing; expected ${expected}`);
    throw thrown;
  }
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(bytes);
  } catch {
    throw taskInvalid(file, null, 'expected UTF-8 text');
  }
}

/** Refuses what would silently change the task: it would be graded under other rules than its author's. */
function requireSupported(config: TaskToml, file: string): void {
  const refuse = (key: string, what: string, next: string) => {
    throw notSupported(file, key, what, next);
  };
  const environment = config.environment ?? {};
  if (environment.gpus)
    refuse('environment.gpus', 'sandboxes have no GPU', 'Remove the key if none is needed.');
  if (environment.mcp_servers?.length)
    refuse('environment.mcp_servers', 'MCP servers of a task are not started yet', REMOVE);
  if (environment.healthcheck)
    refuse('environment.healthcheck', 'a task cannot start services yet', REMOVE);
  if (environment.env && Object.keys(environment.env).length > 0)
    refuse('environment.env', 'variables for the agent are not set yet', REMOVE);
  if (config.verifier?.environment_mode === 'separate' || config.verifier?.environment)
    refuse(
      'verifier.environment',
      'a second environment for the verifier is not built yet',
      REMOVE,
    );
  if (config.verifier?.collect?.length)
    refuse('verifier.collect', 'collect hooks are not run yet', REMOVE);
  if (config.artifacts?.length) refuse('artifacts', 'artifacts are not collected yet', REMOVE);
  if (config.steps?.length) refuse('steps', 'tasks of several steps are not supported yet', REMOVE);
  if (environment.os !== undefined && environment.os.toLowerCase() !== 'linux')
    refuse('environment.os', `sandboxes run Linux, not ${environment.os}`, REMOVE);
}

const REMOVE =
  'Remove the key if the task also works without; docs/tasks.md lists what is supported.';

/** Known keys without an effect here: told, since their author may count on one. */
function ignoredKeys(config: TaskToml, files: readonly BundleEntry[]): string[] {
  const keys: string[] = [];
  const environment = config.environment;
  if (config.agent?.user !== undefined) keys.push('agent.user');
  if (config.verifier?.user !== undefined) keys.push('verifier.user');
  if (environment?.skills_dir !== undefined) keys.push('environment.skills_dir');
  if (environment?.docker_image !== undefined && files.some((file) => file.path === 'Dockerfile'))
    keys.push('environment.docker_image');
  return keys;
}

function sandboxSpec(
  config: TaskToml,
  image: string | null,
  allow: readonly NetworkRule[],
): Partial<SandboxSpec> {
  const environment = config.environment ?? {};
  return {
    ...(image !== null && { image }),
    network: allow.length > 0 ? { allow } : 'none',
    ...(environment.cpus !== undefined && { cpus: environment.cpus }),
    ...(environment.memory_mb !== undefined && { memoryBytes: environment.memory_mb * MIB }),
    ...(environment.storage_mb !== undefined && { diskBytes: environment.storage_mb * MIB }),
  };
}

interface ImageSource {
  dir: string;
  /** What lies in `environment/`. */
  entries: BundleEntry[];
  config: TaskToml;
  tomlFile: string;
  options: LoadOptions;
}

interface ReadImage {
  workdir: string;
  placed: Placed[];
  /** For `SandboxSpec.image`; null: the machine's own system, with `placed` in the workspace. */
  image: string | null;
  notes: readonly string[];
}

/**
 * What the agent finds at the start: the workspace as the Dockerfile copies it, all of `environment/`, or
 * an image, where one is named or must be built.
 */
async function readImage(source: ImageSource): Promise<ReadImage> {
  const { dir, entries, config, tomlFile, options } = source;
  const root = join(dir, 'environment');
  const has = (path: string) => entries.some((entry) => entry.path === path);
  for (const compose of ['docker-compose.yaml', 'docker-compose.yml'])
    if (has(compose))
      throw notSupported(
        join(root, compose),
        'services',
        'environments of several containers are not supported yet',
        'Bring the task down to one environment, or leave the file out.',
      );
  const file = join(root, 'Dockerfile');
  let plan: ImagePlan;
  if (has('Dockerfile')) {
    try {
      plan = readDockerfile(await readText(file, TOML_BYTES, 'a Dockerfile'), file);
      if (has('.dockerignore'))
        throw notSupported(
          join(root, '.dockerignore'),
          'patterns',
          'they need an image build',
          'COPY only what the agent shall see, and leave the file out.',
        );
    } catch (thrown) {
      if (!(thrown instanceof LonghaulError && thrown.code === 'CapabilityMissing')) throw thrown;
      if (options.buildImage === undefined) throw thrown;
      return imageOf(
        source,
        await options.buildImage({
          context: root,
          dockerfile: 'Dockerfile',
          runTimeoutMs: (config.environment?.build_timeout_sec ?? DEFAULT_BUILD_SEC) * 1000,
          allow: options.allow ?? [],
        }),
      );
    }
  } else if (config.environment?.docker_image !== undefined) {
    if (options.resolveImage === undefined)
      throw notSupported(
        tomlFile,
        'environment.docker_image',
        'there is no image store here',
        'Run it where bubblewrap works, or put the starting files into environment/ and leave the key out.',
      );
    return imageOf(source, await options.resolveImage(config.environment.docker_image));
  } else {
    const all = { sources: ['.'], target: WORKSPACE, intoDirectory: true };
    plan = { workdir: WORKSPACE, copies: [all], notes: [] };
  }
  const workdir = config.environment?.workdir ?? plan.workdir;
  if (workdir !== WORKSPACE && !workdir.startsWith(`${WORKSPACE}/`))
    throw notSupported(
      tomlFile,
      'environment.workdir',
      `${workdir} lies outside of ${WORKSPACE}`,
      `Use ${WORKSPACE} or a directory below it, or WORKDIR ${workdir} in environment/Dockerfile.`,
    );
  // Later instructions overwrite earlier ones.
  const byPath = new Map<string, Placed>();
  for (const step of plan.copies)
    for (const item of applyCopy(step, root, entries, file)) byPath.set(item.path, item);
  return { workdir, placed: [...byPath.values()], image: null, notes: plan.notes };
}

/** `CapabilityMissing` where the task wants commands to start elsewhere than in the image's directory. */
function imageOf({ config, tomlFile }: ImageSource, built: TaskImage): ReadImage {
  const { image, workdir, notes } = built;
  const wanted = config.environment?.workdir;
  if (wanted !== undefined && posix.resolve(wanted) !== workdir)
    throw notSupported(
      tomlFile,
      'environment.workdir',
      `commands start in the directory of the image, which is ${workdir}, not in ${wanted}`,
      `Write WORKDIR ${wanted} into environment/Dockerfile and leave the key out.`,
    );
  return { workdir, placed: [], image, notes };
}

/** Docker's rule: a directory's content is copied, not the directory itself. */
function applyCopy(step: CopyStep, root: string, entries: BundleEntry[], file: string): Placed[] {
  const target = posix.relative(WORKSPACE, step.target);
  const out: Placed[] = [];
  for (const source of step.sources) {
    const single = entries.find((entry) => entry.path === source);
    if (single !== undefined && single.kind !== 'directory') {
      const path = step.intoDirectory ? posix.join(target, posix.basename(source)) : target;
      if (path === '' || path === '.')
        throw taskInvalid(
          file,
          `COPY ${source}`,
          'expected a target that ends in / or names a file',
        );
      out.push({ entry: single, root, path });
    } else if (source === '.' || single?.kind === 'directory') {
      const prefix = source === '.' ? '' : `${source}/`;
      for (const entry of entries)
        if (entry.path.startsWith(prefix))
          out.push({ entry, root, path: posix.join(target, entry.path.slice(prefix.length)) });
    } else {
      throw taskInvalid(file, `COPY ${source}`, `no such file in ${root}`);
    }
  }
  return out;
}

function place(root: string, entries: readonly BundleEntry[]): Placed[] {
  return entries.map((entry) => ({ entry, root, path: entry.path }));
}
