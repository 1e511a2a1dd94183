import { type ChildProcess, spawn } from 'node:child_process';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { LonghaulError } from '../../core/index.ts';
import {
  type Answer,
  type Frame,
  FrameReader,
  frame,
  MAX_BODY_BYTES,
  type Request,
} from './protocol.ts';
import { pythonFolder } from './python.ts';

/** JavaScript's own heap; snippets live in WebAssembly memory, which their limit bounds. */
const HEAP_MB = 256;
/** For deep recursion in an interpreter, which uses the host's stack; less than the 8 MiB it commonly has. */
const STACK_KB = 4000;
/** A process that holds more is replaced before the next batch. */
const MAX_HELD_BYTES = 384 * 1024 * 1024;
const START_TIMEOUT_MS = 30_000;
/** How long the process may take for what is not a snippet: compiling an interpreter is the longest. */
export const PATIENCE_MS = 60_000;
/** Signals of a process that ended itself: a fault in an interpreter, or no memory for its heap. */
const OWN_SIGNALS = ['SIGSEGV', 'SIGABRT', 'SIGBUS', 'SIGILL', 'SIGTRAP', 'SIGFPE'];

/** What the process may read: its own code, and where Node looks for the interpreters' packages. */
function readable(): string[] {
  const here = dirname(fileURLToPath(import.meta.url));
  const room = dirname(here);
  const marker = '/node_modules/';
  const packages = [fileURLToPath(import.meta.resolve('quickjs-emscripten'))];
  const python = pythonFolder();
  if (python !== null) packages.push(python);
  const result = [room, join(dirname(room), 'core')];
  for (const each of packages) result.push(each.slice(0, each.lastIndexOf(marker) + marker.length));
  for (let folder = here; ; folder = dirname(folder)) {
    result.push(join(folder, 'node_modules'), join(folder, 'package.json'));
    if (folder === dirname(folder)) return [...new Set(result)];
  }
}

/** The permissions of the process: to read those files, and nothing else that Node can refuse. */
export function restrictions(): string[] {
  return ['--permission', ...readable().map((path) => `--allow-fs-read=${path}`)];
}

export type Reply = { header: Answer; body: Uint8Array };

/** How a process ended. `own`: by a signal that it raised itself, as a guest may cause. */
export interface ProcessEnd {
  own: boolean;
  signal: string | null;
  memory: boolean;
  said: string;
}

/** The process of one sandbox. Answers come in the order of the requests; it is used by one at a time. */
export class EngineProcess {
  readonly #child: ChildProcess;
  readonly #reader = new FrameReader(MAX_BODY_BYTES);
  readonly #replies: Reply[] = [];
  #wake: (() => void) | null = null;
  #stderr = '';
  #end: ProcessEnd | null = null;
  /** Resident memory and cpu time, as it said last. */
  heldBytes = 0;
  cpuMs = 0;

  constructor() {
    const file = import.meta.url.endsWith('.ts') ? './host.ts' : './host.js';
    this.#child = spawn(
      process.execPath,
      [
        ...restrictions(),
        `--max-old-space-size=${HEAP_MB}`,
        `--stack-size=${STACK_KB}`,
        '--no-warnings',
        fileURLToPath(new URL(file, import.meta.url)),
      ],
      // A session of its own, so that Ctrl-C at a terminal is the owner's alone; the end of input ends it.
      { env: {}, cwd: '/', stdio: ['pipe', 'pipe', 'pipe'], detached: true },
    );
    this.#child.stdin!.on('error', () => {});
    this.#child.on('error', (error) => this.#ended(null, error.message));
    this.#child.on('close', (_code, signal) => this.#ended(signal, this.#stderr));
    this.#child.stderr!.on('data', (chunk: Buffer) => {
      this.#stderr = (this.#stderr + chunk.toString()).slice(-2000);
    });
    this.#child.stdout!.on('data', (chunk: Buffer) => {
      try {
        for (const each of this.#reader.add(chunk) as (Frame & { header: Answer })[])
          this.#replies.push(each);
      } catch (error) {
        this.#ended(null, error instanceof Error ? error.message : String(error));
        this.kill();
      }
      this.#wake?.();
    });
  }

  #ended(signal: string | null, said: string): void {
    const own = signal !== null && OWN_SIGNALS.includes(signal);
    this.#end ??= { own, signal, memory: /out of memory|allocation failed/i.test(said), said };
    this.#wake?.();
  }

  get pid(): number | undefined {
    return this.#child.pid;
  }

  get dead(): boolean {
    return this.#end !== null;
  }

  get usable(): boolean {
    return !this.dead && this.heldBytes < MAX_HELD_BYTES;
  }

  /** Resolves when the process can run snippets; `SandboxUnavailable` when it does not start. */
  async ready(): Promise<void> {
    const reply = await this.next(START_TIMEOUT_MS);
    if (reply && 'header' in reply && reply.header.kind === 'ready') return;
    this.kill();
    const said =
      reply === null
        ? 'it took too long'
        : 'header' in reply
          ? reply.header.kind
          : reply.said.trim().split('\n').at(-1);
    throw new LonghaulError(
      'SandboxUnavailable',
      `the WebAssembly sandbox's process did not start: ${said}`,
    );
  }

  send(request: Request, body: readonly Uint8Array[]): void {
    for (const part of frame(request, body)) this.#child.stdin!.write(part);
  }

  /** The next answer, or how the process ended; null when there is none of both in time. */
  async next(ms: number): Promise<Reply | ProcessEnd | null> {
    let late = false;
    const timer = setTimeout(
      () => {
        late = true;
        this.#wake?.();
      },
      Math.max(0, ms),
    );
    try {
      while (this.#replies.length === 0 && !this.#end && !late)
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
    } finally {
      clearTimeout(timer);
    }
    return this.#replies.shift() ?? this.#end;
  }

  kill(): void {
    this.#end ??= { own: false, signal: 'SIGKILL', memory: false, said: 'it was ended' };
    this.#child.kill('SIGKILL');
    this.#wake?.();
  }
}

/**
 * The processes of a driver's sandboxes. None is ever used by two. A sandbox gets one when it first
 * runs code; where no more may live, the one that was idle longest is ended, whose sandbox gets
 * another when it needs one: the files are the driver's.
 */
export class EnginePool {
  readonly #limit: number;
  /** By owner, in the order of their last use. */
  readonly #owned = new Map<object, { process: EngineProcess; busy: boolean }>();
  readonly #waiting: (() => void)[] = [];
  #spare: Promise<EngineProcess> | null = null;
  /** Memory limit of the sandbox that ran Python last: what a process that waits is made ready for. */
  #python: number | null = null;
  #starting = 0;
  #closed = false;

  constructor(limit: number) {
    this.#limit = limit;
  }

  async #start(): Promise<EngineProcess> {
    const process = new EngineProcess();
    await process.ready();
    if (this.#python !== null && !this.#closed) {
      process.send({ kind: 'warm', memoryBytes: this.#python }, []);
      await process.ready();
    }
    if (!this.#closed) return process;
    process.kill();
    throw new LonghaulError('SandboxBroken', 'the sandbox driver is closed');
  }

  /** Starts a process ahead of its use. `SandboxUnavailable` when it cannot be started. */
  async warm(): Promise<void> {
    this.#spare ??= this.#start();
    await this.#spare;
  }

  /** Processes that are started from now on are made ready for Python under this limit. */
  expectPython(memoryBytes: number): void {
    this.#python = memoryBytes;
  }

  /** The owner's process, which no other can take until `release`. */
  async acquire(owner: object): Promise<EngineProcess> {
    for (;;) {
      if (this.#closed) throw new LonghaulError('SandboxBroken', 'the sandbox driver is closed');
      const own = this.#owned.get(owner);
      if (own?.process.usable) {
        own.busy = true;
        return own.process;
      }
      this.forget(owner);
      if (this.#owned.size + this.#starting < this.#limit) return this.#give(owner);
      const idle = [...this.#owned].find(([, { busy }]) => !busy);
      if (idle) this.forget(idle[0]);
      else await new Promise<void>((resolve) => this.#waiting.push(resolve));
    }
  }

  async #give(owner: object): Promise<EngineProcess> {
    this.#starting++;
    // Taken before anything is waited for: two must not get the same.
    const waiting = this.#spare;
    this.#spare = null;
    try {
      const spare = await waiting?.catch(() => null);
      const process = spare && !spare.dead ? spare : await this.#start();
      if (this.#closed) {
        process.kill();
        throw new LonghaulError('SandboxBroken', 'the sandbox driver is closed');
      }
      this.#owned.set(owner, { process, busy: true });
      return process;
    } finally {
      this.#starting--;
      if (!this.#closed && !this.#spare) {
        this.#spare = this.#start();
        // Said to the next who asks for one.
        this.#spare.catch(() => {});
      }
      this.#waiting.shift()?.();
    }
  }

  release(owner: object): void {
    const own = this.#owned.get(owner);
    if (own) {
      own.busy = false;
      this.#owned.delete(owner);
      this.#owned.set(owner, own);
    }
    this.#waiting.shift()?.();
  }

  /** Ends the owner's process, whatever it does. */
  forget(owner: object): void {
    this.#owned.get(owner)?.process.kill();
    if (this.#owned.delete(owner)) this.#waiting.shift()?.();
  }

  close(): void {
    this.#closed = true;
    for (const { process } of this.#owned.values()) process.kill();
    this.#owned.clear();
    this.#spare?.then((process) => process.kill()).catch(() => {});
    for (const wake of this.#waiting.splice(0)) wake();
  }
}
