import { posix } from 'node:path';
import { LonghaulError } from '../../../core/index.ts';
import type { LayerId, NetworkPolicy, SandboxDriver, SandboxSpec } from '../../contract.ts';
import { agentSandbox, type BuildSandbox } from '../import.ts';
import { hostPlatform } from '../oci.ts';
import { type ImageRecord, readStep, sha256, writeStep } from '../record.ts';
import type { BuildContext } from './context.ts';
import { copyAcross, copyIn, makeFolder, planCopy, selectCopy } from './copy.ts';
import { dockerfileError, type Instruction, jsonForm, parseDockerfile } from './dockerfile.ts';
import { copyFailure, runFailure } from './failure.ts';
import { emptyStage, nextKey, type Stage, variables } from './stage.ts';
import { expandWord, expandWords, rawWords, type Variables, WordError } from './words.ts';

export interface BuilderOptions {
  driver: SandboxDriver;
  /** The driver's folder. */
  dir: string;
  context: BuildContext;
  dockerfile: string;
  buildArgs: Readonly<Record<string, string>>;
  target: string | undefined;
  spec: Partial<SandboxSpec>;
  network: NetworkPolicy | undefined;
  runTimeoutMs: number;
  signal: AbortSignal | undefined;
  /** Told of each step and of what it prints. */
  onProgress: (text: string) => void;
  /** An image by its name or digest; throws `NotFound`. */
  image(reference: string): Promise<ImageRecord>;
}

interface StagePlan {
  from: Instruction;
  base: string;
  name: string | null;
  body: Instruction[];
}

export interface BuiltStage {
  stage: Stage;
  notes: string[];
  steps: { line: number; cached: boolean }[];
}

const SUPPORTED = new Set(
  'ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM LABEL RUN SHELL USER WORKDIR'.split(' '),
);
const IGNORED: Record<string, string> = {
  MAINTAINER: 'not used',
  STOPSIGNAL: 'not used: sandboxes end their processes at once',
};

/** Runs one Dockerfile. Each step that changes files is a durable layer, found again by its key. */
export class ImageBuilder {
  readonly #options: BuilderOptions;
  readonly #plans: StagePlan[] = [];
  readonly #globals: Record<string, string> = {};
  readonly #built = new Map<StagePlan, Promise<Stage>>();
  readonly #notes = new Set<string>();
  readonly #steps: { line: number; cached: boolean }[] = [];
  readonly #escape: string;
  readonly #argsUsed = new Set<string>();

  /** `ConfigInvalid` with the line for what is no Dockerfile, before anything is built. */
  constructor(options: BuilderOptions) {
    this.#options = options;
    const { instructions, escapedBy } = parseDockerfile(options.dockerfile);
    this.#escape = escapedBy;
    for (const instruction of instructions) {
      const { keyword, line } = instruction;
      if (!SUPPORTED.has(keyword) && !(keyword in IGNORED))
        throw dockerfileError(line, `${keyword} is not supported`);
      if (keyword === 'FROM') this.#plans.push(this.#planStage(instruction));
      else if (this.#plans.length > 0) this.#plans.at(-1)!.body.push(instruction);
      else if (keyword === 'ARG') this.#declare(instruction, this.#globals, {});
      else throw dockerfileError(line, `expected FROM or ARG before ${keyword}`);
    }
    if (this.#plans.length === 0) throw dockerfileError(1, 'there is no FROM');
  }

  async build(): Promise<BuiltStage> {
    const { target } = this.#options;
    const plan = target === undefined ? this.#plans.at(-1)! : this.#findStage(target);
    if (!plan)
      throw new LonghaulError('NotFound', `the Dockerfile has no stage ${target}`, {
        next: `Name one of ${this.#plans.flatMap((each) => each.name ?? []).join(', ') || 'its stages by number'}.`,
      });
    const stage = await this.#stage(plan);
    for (const name of Object.keys(this.#options.buildArgs))
      if (!this.#argsUsed.has(name)) this.#notes.add(`build argument ${name}: no ARG declares it`);
    return { stage, notes: [...this.#notes], steps: this.#steps };
  }

  // Reading

  #within<T>(line: number, read: () => T): T {
    try {
      return read();
    } catch (error) {
      if (error instanceof WordError) throw dockerfileError(line, error.message);
      throw error;
    }
  }

  #words(instruction: Instruction, known: Variables): string[] {
    return this.#within(instruction.line, () => expandWords(instruction.rest, known, this.#escape));
  }

  #planStage(from: Instruction): StagePlan {
    const known = { ...platformArgs(), ...this.#globals };
    const words = this.#words(from, known);
    const [base, as, name] = words;
    const named = words.length === 3 && as!.toUpperCase() === 'AS';
    if (!base || !(words.length === 1 || named))
      throw dockerfileError(from.line, 'expected FROM IMAGE or FROM IMAGE AS NAME');
    for (const [flag, value] of from.flags) {
      const platform = this.#within(from.line, () => expandWord(value, known, this.#escape));
      if (flag !== 'platform' || platform !== hostPlatform())
        throw dockerfileError(
          from.line,
          `FROM --${flag}=${platform}: builds are for ${hostPlatform()}`,
        );
    }
    if (name !== undefined && !/^[a-z][a-z0-9._-]*$/i.test(name))
      throw dockerfileError(from.line, `${name} is no name for a stage`);
    return { from, base, name: name?.toLowerCase() ?? null, body: [] };
  }

  /** An earlier stage by name or number. */
  #findStage(reference: string, before?: StagePlan): StagePlan | undefined {
    const until = before ? this.#plans.indexOf(before) : this.#plans.length;
    const earlier = this.#plans.slice(0, until);
    const named = earlier.findLast((plan) => plan.name === reference.toLowerCase());
    return named ?? (/^\d+$/.test(reference) ? earlier[Number(reference)] : undefined);
  }

  /** ARG: a value of the caller, else the default, else that of an ARG before the first FROM. */
  #declare(instruction: Instruction, into: Record<string, string>, known: Variables): void {
    const { line, rest } = instruction;
    const words = this.#within(line, () => rawWords(rest, this.#escape));
    if (words.length === 0) throw dockerfileError(line, 'expected ARG NAME or ARG NAME=DEFAULT');
    for (const word of words) {
      const equals = word.indexOf('=');
      const name = equals < 0 ? word : word.slice(0, equals);
      requireVariable(name, line);
      this.#argsUsed.add(name);
      const given = this.#options.buildArgs[name];
      const seen = { ...known, ...into };
      const usual =
        equals < 0
          ? (this.#globals[name] ?? platformArgs()[name])
          : this.#within(line, () => expandWord(word.slice(equals + 1), seen, this.#escape));
      const value = given ?? usual;
      if (value?.includes('\0')) throw dockerfileError(line, `${name} holds a NUL character`);
      if (value !== undefined) into[name] = value;
    }
  }

  /** `NAME=VALUE …`, or the old form `NAME VALUE` with all the rest as the value. */
  #pairs({ keyword, line, rest }: Instruction, known: Variables): [string, string][] {
    return this.#within(line, () => {
      const words = rawWords(rest, this.#escape);
      const expand = (text: string) => expandWord(text, known, this.#escape);
      if (words.length > 1 && !words[0]!.includes('='))
        return [[expand(words[0]!), expand(rest.slice(words[0]!.length).trim())]];
      if (words.length === 0) throw dockerfileError(line, `expected ${keyword} NAME=VALUE`);
      return words.map((word) => {
        const equals = word.indexOf('=');
        if (equals < 1) throw dockerfileError(line, `expected ${keyword} NAME=VALUE, not ${word}`);
        return [expand(word.slice(0, equals)), expand(word.slice(equals + 1))];
      });
    });
  }

  #note(instruction: Instruction, text: string): void {
    this.#notes.add(`line ${instruction.line}: ${instruction.keyword}: ${text}`);
  }

  // Building

  #stage(plan: StagePlan): Promise<Stage> {
    let built = this.#built.get(plan);
    if (!built) {
      built = this.#run(plan);
      this.#built.set(plan, built);
    }
    return built;
  }

  async #base(plan: StagePlan): Promise<Stage> {
    const earlier = this.#findStage(plan.base, plan);
    if (earlier) return { ...(await this.#stage(earlier)), args: {} };
    if (plan.base === 'scratch') return emptyStage(false);
    if (plan.base === 'host') return emptyStage(true);
    return imageStage(await this.#options.image(plan.base));
  }

  async #run(plan: StagePlan): Promise<Stage> {
    // What it copies from comes first, so that one sandbox lives at a time.
    for (const { keyword, flags } of plan.body) {
      const from = keyword === 'COPY' ? flags.get('from') : undefined;
      const earlier = from === undefined ? undefined : this.#findStage(from, plan);
      if (earlier) await this.#stage(earlier);
    }
    let stage = structuredClone(await this.#base(plan));
    const workbench = new Workbench(this.#options);
    try {
      for (const instruction of plan.body)
        stage = await this.#instruction(plan, stage, instruction, workbench);
      return stage;
    } finally {
      await workbench.stop();
    }
  }

  async #instruction(
    plan: StagePlan,
    stage: Stage,
    instruction: Instruction,
    workbench: Workbench,
  ): Promise<Stage> {
    this.#requireTime();
    const { keyword, line, rest } = instruction;
    const { config } = stage;
    const known = variables(stage);
    if (instruction.flags.size > 0 && keyword !== 'COPY' && keyword !== 'ADD')
      throw dockerfileError(
        line,
        `${keyword} --${[...instruction.flags.keys()][0]} is not supported`,
      );
    switch (keyword) {
      case 'RUN':
        return this.#command(stage, instruction, workbench);
      case 'COPY':
      case 'ADD':
        return this.#copy(plan, stage, instruction, workbench);
      case 'WORKDIR': {
        const path = this.#within(line, () => expandWord(rest, known, this.#escape));
        if (path === '' || path.includes('\0'))
          throw dockerfileError(line, 'expected WORKDIR DIRECTORY');
        config.workdir = posix.resolve(config.workdir ?? '/', path);
        const { workdir } = config;
        return this.#step(stage, instruction, ['workdir', workdir], workbench, (sandbox) =>
          makeFolder(sandbox, workdir),
        );
      }
      case 'ENV':
        for (const [name, value] of this.#pairs(instruction, known)) {
          requireVariable(name, line);
          if (value.includes('\0')) throw dockerfileError(line, `${name} holds a NUL character`);
          config.env[name] = value;
        }
        break;
      case 'ARG':
        this.#declare(instruction, stage.args, known);
        break;
      case 'LABEL':
        for (const [name, value] of this.#pairs(instruction, known)) config.labels[name] = value;
        break;
      case 'USER':
        config.user = this.#within(line, () => expandWord(rest, known, this.#escape));
        this.#note(instruction, 'recorded; everything runs as the one user that a sandbox has');
        break;
      case 'EXPOSE':
        config.exposed.push(...this.#words(instruction, known));
        break;
      case 'ENTRYPOINT':
        config.entrypoint = jsonForm(rest) ?? [...stage.shell, rest];
        config.cmd = null;
        break;
      case 'CMD':
        config.cmd = jsonForm(rest) ?? [...stage.shell, rest];
        break;
      case 'SHELL': {
        const shell = jsonForm(rest);
        if (!shell?.length) throw dockerfileError(line, 'expected SHELL ["PROGRAM", …]');
        stage.shell = shell;
        break;
      }
      default:
        this.#note(instruction, IGNORED[keyword]!);
    }
    return stage;
  }

  async #command(stage: Stage, instruction: Instruction, workbench: Workbench): Promise<Stage> {
    const { line, rest, heredocs } = instruction;
    const where = `Dockerfile line ${line}`;
    let script = rest;
    if (heredocs.length === 1 && /^<<-?(["']?)\w+\1$/.test(rest)) {
      script = heredocs[0]!.content;
      if (script.startsWith('#!'))
        throw dockerfileError(
          line,
          'a heredoc with #! is not supported',
          'Write RUN PROGRAM <<EOF.',
        );
    } else for (const { name, content } of heredocs) script += `\n${content}${name}`;
    if (script.trim() === '') throw dockerfileError(line, 'expected RUN COMMAND');
    const argv = jsonForm(rest) ?? [...stage.shell, script];
    if (argv.length === 0) throw dockerfileError(line, 'expected RUN ["PROGRAM", …]');
    const env = variables(stage);
    const cwd = stage.config.workdir ?? '/';
    const { signal, runTimeoutMs, network, onProgress } = this.#options;
    const details = ['run', argv, env, cwd, network ?? null];
    return this.#step(stage, instruction, details, workbench, async (sandbox) => {
      const before = sandbox.networkAttempts().length;
      const result = await sandbox.exec({
        argv,
        env,
        cwd,
        timeoutMs: runTimeoutMs,
        onOutput: (_, chunk) => onProgress(Buffer.from(chunk).toString()),
        ...(signal && { signal }),
      });
      this.#requireTime();
      if (result.cause !== 'exited' || result.code !== 0)
        throw runFailure(
          where,
          argv.join(' '),
          result,
          stage.host,
          sandbox.networkAttempts().slice(before),
        );
    });
  }

  async #copy(
    plan: StagePlan,
    stage: Stage,
    instruction: Instruction,
    workbench: Workbench,
  ): Promise<Stage> {
    const { line, flags } = instruction;
    const { context } = this.#options;
    const workdir = stage.config.workdir ?? '/';
    const copy = this.#within(line, () =>
      planCopy(instruction, workdir, variables(stage), this.#escape),
    );
    if (flags.has('chown'))
      this.#note(instruction, '--chown is not used: every file belongs to the one user');
    const placed = [copy.target, copy.intoFolder, copy.mode, [...copy.inline]];
    if (copy.from === null) {
      const selected = await selectCopy(copy, context);
      const details = ['copy', placed, selected.digest, selected.folders];
      return this.#step(stage, instruction, details, workbench, (sandbox) =>
        copyIn(sandbox, copy, selected, context),
      );
    }
    if (copy.inline.size > 0) throw dockerfileError(line, 'a heredoc comes from no other image');
    const earlier = this.#findStage(copy.from, plan);
    const other = earlier
      ? await this.#stage(earlier)
      : copy.from === 'host'
        ? emptyStage(true)
        : imageStage(await this.#options.image(copy.from));
    const details = ['across', placed, copy.sources, other.key];
    return this.#step(stage, instruction, details, workbench, (sandbox) =>
      copyAcross(sandbox, copy, line, (asWorkspace) => workbench.open(other, asWorkspace)),
    );
  }

  /** Does what changes files, or takes the layer of an equal step of before. */
  async #step(
    stage: Stage,
    instruction: Instruction,
    details: readonly unknown[],
    workbench: Workbench,
    act: (sandbox: BuildSandbox) => Promise<void>,
  ): Promise<Stage> {
    const { driver, dir, onProgress } = this.#options;
    const { line, keyword, rest } = instruction;
    const key = nextKey(stage, details);
    const history = [...stage.history, `${keyword} ${rest}`];
    const known = readStep(dir, key);
    const cached = known !== null && (await driver.hasLayer(known));
    this.#steps.push({ line, cached });
    onProgress(`line ${line}: ${keyword} ${rest.split('\n')[0]}${cached ? ' (cached)' : ''}\n`);
    if (cached) return { ...stage, key, layer: known, history };
    try {
      const sandbox = await workbench.at(stage);
      await act(sandbox);
      this.#requireTime();
      const layer = await workbench.save();
      writeStep(dir, key, layer);
      return { ...stage, key, layer, history };
    } catch (error) {
      this.#requireTime();
      throw copyFailure(`Dockerfile line ${line}`, error, stage.host);
    }
  }

  #requireTime(): void {
    if (this.#options.signal?.aborted)
      throw new LonghaulError('Interrupted', 'the image build was cancelled', {
        next: 'Build again: steps that were finished are kept.',
      });
  }
}

/** The sandbox in which the steps of one stage run, made when the first of them does. */
class Workbench {
  readonly #options: BuilderOptions;
  #sandbox: BuildSandbox | null = null;
  #layer: LayerId | null = null;

  constructor(options: BuilderOptions) {
    this.#options = options;
  }

  open(stage: Stage, asWorkspace: boolean): Promise<BuildSandbox> {
    const { driver, spec, network } = this.#options;
    const image = asWorkspace ? 'host' : stage.host ? 'build:host' : 'build:scratch';
    return agentSandbox(
      driver,
      { ...spec, image, ...(network && !asWorkspace && { network }) },
      stage.layer ?? undefined,
    );
  }

  /** The sandbox, with the stage's files. */
  async at(stage: Stage): Promise<BuildSandbox> {
    if (this.#sandbox && this.#layer === stage.layer) return this.#sandbox;
    await this.stop();
    this.#sandbox = await this.open(stage, false);
    this.#layer = stage.layer;
    return this.#sandbox;
  }

  async save(): Promise<LayerId> {
    this.#layer = await this.#sandbox!.snapshot({ durable: true, onBusy: 'stop' });
    return this.#layer;
  }

  async stop(): Promise<void> {
    await this.#sandbox?.stop();
    this.#sandbox = null;
  }
}

function imageStage(record: ImageRecord): Stage {
  return {
    ...emptyStage(record.host),
    key: sha256(`image ${record.digest}`),
    layer: record.layer,
    config: structuredClone(record.config),
    history: record.history,
  };
}

function requireVariable(name: string, line: number): void {
  if (!/^[A-Za-z_][A-Za-z0-9_.-]*$/.test(name))
    throw dockerfileError(line, `${JSON.stringify(name)} is no name for a variable`);
}

/** ARG variables that Docker itself has values for, once they are declared. */
function platformArgs(): Record<string, string> {
  const platform = hostPlatform();
  const [os, architecture] = platform.split('/') as [string, string];
  return {
    TARGETPLATFORM: platform,
    TARGETOS: os,
    TARGETARCH: architecture,
    BUILDPLATFORM: platform,
    BUILDOS: os,
    BUILDARCH: architecture,
  };
}
