import { type ChildProcess, spawn } from 'node:child_process';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { LonghaulError } from '../../core/index.ts';
import type { SnippetAnswer, SnippetBatch, SnippetResult } from './protocol.ts';

/** JavaScript's own heap; snippets live in WebAssembly memory, which their limit bounds. */
const HEAP_MB = 256;
/** A process that holds more is replaced before the next batch. */
const MAX_HELD_BYTES = 384 * 1024 * 1024;
const START_TIMEOUT_MS = 30_000;
/** How long past its deadline a snippet may take before its process is killed. */
const GRACE_MS = 2000;

/** What the process may read: its own code, and where Node looks for the interpreter's package. */
function readable(): string[] {
  const here = dirname(fileURLToPath(import.meta.url));
  const room = dirname(here);
  const packageFile = fileURLToPath(import.meta.resolve('quickjs-emscripten'));
  const marker = '/node_modules/';
  const result = [room, join(dirname(room), 'core')];
  result.push(packageFile.slice(0, packageFile.lastIndexOf(marker) + marker.length));
  for (let folder = here; ; folder = dirname(folder)) {
    result.push(join(folder, 'node_modules'), join(folder, 'package.json'));
    if (folder === dirname(folder)) return result;
  }
}

type SnippetOutcome = SnippetAnswer | { died: string };

/** A process with the interpreter; runs one batch at a time. */
class SnippetProcess {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterableIterator<string>;
  #stderr = '';
  held = 0;

  constructor() {
    const file = import.meta.url.endsWith('.ts') ? './host.ts' : './host.js';
    this.#child = spawn(
      process.execPath,
      [
        '--permission',
        ...readable().map((path) => `--allow-fs-read=${path}`),
        `--max-old-space-size=${HEAP_MB}`,
        '--no-warnings',
        fileURLToPath(new URL(file, import.meta.url)),
      ],
      // A session of its own, so that Ctrl-C at a terminal is the owner's alone; the end of input ends it.
      { env: {}, cwd: '/', stdio: ['pipe', 'pipe', 'pipe'], detached: true },
    );
    this.#child.stdin!.on('error', () => {});
    this.#child.on('error', (error) => {
      this.#stderr = error.message;
    });
    this.#child.stderr!.on('data', (chunk: Buffer) => {
      this.#stderr = (this.#stderr + chunk.toString()).slice(-2000);
    });
    this.#lines = createInterface({ input: this.#child.stdout! })[Symbol.asyncIterator]();
  }

  async #next(ms: number): Promise<unknown> {
    const timer = setTimeout(() => this.kill(), ms);
    try {
      const line = await this.#lines.next();
      return line.done ? null : JSON.parse(line.value);
    } finally {
      clearTimeout(timer);
    }
  }

  async ready(): Promise<void> {
    if (await this.#next(START_TIMEOUT_MS)) return;
    throw new LonghaulError(
      'SandboxUnavailable',
      `QuickJS process did not start: ${this.#stderr.trim().split('\n').at(-1)}`,
    );
  }

  /** Answers as far as they come; `died` ends the list when the process did not survive a snippet. */
  async *run(batch: SnippetBatch): AsyncGenerator<SnippetOutcome> {
    this.#child.stdin!.write(`${JSON.stringify(batch)}\n`);
    for (const snippet of batch.snippets) {
      const answer = (await this.#next(snippet.timeoutMs + GRACE_MS)) as SnippetAnswer | null;
      if (!answer) {
        yield { died: this.#stderr };
        return;
      }
      this.held = answer.heldBytes;
      yield answer;
    }
  }

  kill(): void {
    this.#child.kill('SIGKILL');
  }
}

/** Several snippet processes shared by all sandboxes of a driver: jobs wait for a free one. */
export class SnippetProcesses {
  readonly #limit: number;
  readonly #idle: SnippetProcess[] = [];
  readonly #busy = new Set<SnippetProcess>();
  readonly #waiting: (() => void)[] = [];
  #count = 0;
  #closed = false;

  constructor(limit: number) {
    this.#limit = limit;
  }

  async #acquire(): Promise<SnippetProcess> {
    while (!this.#closed && this.#idle.length === 0 && this.#count >= this.#limit)
      await new Promise<void>((resolve) => this.#waiting.push(resolve));
    if (this.#closed) throw new LonghaulError('SandboxBroken', 'the sandbox driver is closed');
    const idle = this.#idle.pop();
    if (idle) {
      this.#busy.add(idle);
      return idle;
    }
    this.#count++;
    const made = new SnippetProcess();
    this.#busy.add(made);
    try {
      await made.ready();
      return made;
    } catch (error) {
      this.#release(made, false);
      throw error;
    }
  }

  #release(used: SnippetProcess, usable: boolean): void {
    this.#busy.delete(used);
    if (usable && used.held < MAX_HELD_BYTES && !this.#closed) this.#idle.push(used);
    else {
      used.kill();
      this.#count--;
    }
    this.#waiting.shift()?.();
  }

  /** Starts a process ahead of the first snippet; `SandboxUnavailable` when it cannot be started. */
  async warm(): Promise<void> {
    this.#release(await this.#acquire(), true);
  }

  /**
   * Runs a batch in order. A snippet that takes its process down (a deadline it outlasted, a crash)
   * gets that as its result and the rest goes to another process.
   */
  async run(
    batch: SnippetBatch,
    onAnswer: (answer: SnippetAnswer) => void,
  ): Promise<SnippetResult[]> {
    const results: SnippetResult[] = [];
    while (results.length < batch.snippets.length) {
      const used = await this.#acquire();
      let usable = true;
      const started = performance.now();
      const rest = { ...batch, snippets: batch.snippets.slice(results.length) };
      for await (const outcome of used.run(rest)) {
        if ('died' in outcome) {
          usable = false;
          const ms = performance.now() - started;
          const current = batch.snippets[results.length]!;
          const memory = /memory/i.test(outcome.died);
          const nothing = { head: '', tail: '', total: 0 };
          const cause = memory || ms < current.timeoutMs ? 'out_of_memory' : 'timeout';
          results.push({ cause, code: null, stdout: nothing, stderr: nothing, ms });
        } else {
          onAnswer(outcome);
          results.push(outcome.result);
        }
      }
      this.#release(used, usable);
    }
    return results;
  }

  close(): void {
    this.#closed = true;
    for (const each of [...this.#idle, ...this.#busy]) each.kill();
    this.#idle.length = 0;
    for (const wake of this.#waiting.splice(0)) wake();
  }
}
