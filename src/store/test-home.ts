import { type ChildProcess, spawn } from 'node:child_process';
import { cpSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ulid } from 'ulid';
import type { NewEvent, RunSpec } from '../core/index.ts';
import { stopEmbedded } from './embedded.ts';
import { initialise, preparePaths } from './server.ts';

/** For this room's tests: homes that are removed with their servers, and real processes that use them. */
export class TestHomes {
  readonly #folders: string[] = [];
  readonly #homes: string[] = [];
  #template: string | null = null;
  readonly #children = new Set<TestProcess>();

  /** A home folder that does not exist yet, below a closed folder. */
  create(...below: string[]): string {
    const folder = mkdtempSync(join(tmpdir(), 'lh-store-test-'));
    this.#folders.push(folder);
    const home = join(folder, ...below, 'home');
    mkdirSync(join(home, '..'), { recursive: true });
    this.#homes.push(home);
    return home;
  }

  /** A home whose data directory is there already: a copy, since initialising one takes long. */
  async initialised(...below: string[]): Promise<string> {
    if (this.#template === null) {
      this.#template = mkdtempSync(join(tmpdir(), 'lh-store-test-'));
      await initialise(await preparePaths(this.#template));
    }
    const home = this.create(...below);
    cpSync(this.#template, home, { recursive: true });
    return home;
  }

  /** Runs TypeScript in a process of its own, with `argv` behind the file's own two arguments. */
  process(
    source: string,
    argv: readonly string[],
    options: { uid?: number; gid?: number; env?: NodeJS.ProcessEnv } = {},
  ): TestProcess {
    const child = new TestProcess(source, argv, options);
    this.#children.add(child);
    return child;
  }

  /** To be called once, at the end: the template goes too. */
  async removeAll(): Promise<void> {
    await this.remove();
    if (this.#template !== null) rmSync(this.#template, { recursive: true, force: true });
  }

  /** Ends the processes, stops the servers and removes the folders. */
  async remove(): Promise<void> {
    for (const child of this.#children) await child.kill('SIGKILL');
    this.#children.clear();
    for (const home of this.#homes.splice(0)) await stopEmbedded(home);
    for (const folder of this.#folders.splice(0)) rmSync(folder, { recursive: true, force: true });
  }
}

/** A Node process that runs a module; what it prints comes in lines. */
export class TestProcess {
  readonly child: ChildProcess;
  readonly #lines: string[] = [];
  readonly #ended: Promise<number | null>;
  #stderr = '';
  #wake: (() => void) | null = null;
  #over = false;

  constructor(
    source: string,
    argv: readonly string[],
    options: { uid?: number; gid?: number; env?: NodeJS.ProcessEnv },
  ) {
    const module = source.replaceAll('STORE', import.meta.resolve('./index.ts'));
    this.child = spawn(
      process.execPath,
      ['--input-type=module-typescript', '-e', module, ...argv],
      { stdio: ['ignore', 'pipe', 'pipe'], cwd: '/', ...options },
    );
    let rest = '';
    this.child.stdout?.on('data', (chunk: Buffer) => {
      const parts = (rest + chunk.toString()).split('\n');
      rest = parts.pop() ?? '';
      this.#lines.push(...parts);
      this.#wake?.();
    });
    this.child.stderr?.on('data', (chunk: Buffer) => {
      this.#stderr += chunk.toString();
    });
    this.#ended = new Promise((resolve) => {
      this.child.once('close', (code) => {
        this.#over = true;
        this.#wake?.();
        resolve(code);
      });
    });
  }

  /** The next line it prints. Throws, with what it wrote to stderr, when it ends first. */
  async line(): Promise<string> {
    for (;;) {
      const line = this.#lines.shift();
      if (line !== undefined) return line;
      if (this.#over) throw new Error(`the process ended: ${this.#stderr}`);
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    }
  }

  /** Exit code. Throws, with what it wrote to stderr, when that is not 0. */
  async end(): Promise<void> {
    const code = await this.#ended;
    if (code !== 0) throw new Error(`the process ended with ${code}: ${this.#stderr}`);
  }

  signal(signal: NodeJS.Signals): void {
    this.child.kill(signal);
  }

  async kill(signal: NodeJS.Signals): Promise<void> {
    if (!this.#over) this.child.kill(signal);
    await this.#ended;
  }
}

export const SPEC: RunSpec = {
  kind: 'hosted',
  task: { name: 'fix-the-test', ref: 'tasks/fix-the-test' },
  agent: 'coder',
  model: { ref: 'test/none' },
  seed: 7,
  budget: {},
};

export const newRunId = (): string => ulid();

export function userMessage(content: string): NewEvent {
  return { type: 'message.added', data: { message: { role: 'user', content } } };
}
