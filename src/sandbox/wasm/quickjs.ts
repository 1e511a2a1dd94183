import {
  newQuickJSWASMModule,
  type QuickJSContext,
  type QuickJSWASMModule,
} from 'quickjs-emscripten';
import { byteString, FileFault, type MemoryFiles } from './files.ts';
import type { Snippet, SnippetResult } from './protocol.ts';

const MAX_STACK_BYTES = 256 * 1024;
const PART_LENGTH = 1 << 20;

/**
 * Defined inside: the host offers strings only. What it needs of the built-ins is taken before the
 * snippet can change them. Strings cross as JSON, since NUL ends them otherwise, and long ones in parts,
 * so that none is a large string of the host. Kept short: it is compiled for each snippet.
 */
const PRELUDE = `(() => {
  const { __write: write, __read: read, __store: store, __stdin } = globalThis;
  delete globalThis.__write; delete globalThis.__read; delete globalThis.__store; delete globalThis.__stdin;
  const { stringify, parse } = JSON, slice = Function.prototype.call.bind(String.prototype.slice);
  const parts = (give, name, text) => {
    let at = 0, error;
    do error = give(name, stringify(slice(text, at, at += ${PART_LENGTH})), at < text.length ? '' : 'last');
    while (!error && at < text.length);
    if (error) throw new Error(parse(error));
  };
  const show = (value) => {
    if (typeof value === 'string') return value;
    if (value instanceof Error) return String(value) + '\\n' + (value.stack ?? '');
    if (typeof value === 'object' && value !== null) {
      try { return JSON.stringify(value) ?? String(value); } catch { return String(value); }
    }
    return String(value);
  };
  const line = (to) => (...values) => parts(write, to, values.map(show).join(' ') + '\\n');
  const log = line('1'), warn = line('2'), stdin = parse(__stdin);
  globalThis.print = line('1');
  globalThis.console = { log, info: log, debug: log, warn, error: warn };
  globalThis.readStdin = () => stdin;
  globalThis.readFile = (path) => {
    const [error, text] = read(stringify(String(path)));
    if (error) throw new Error(parse(error));
    return parse(text);
  };
  globalThis.writeFile = (path, text) => parts(store, stringify(String(path)), String(text));
})()`;

export const messageOf = (error: unknown) =>
  error instanceof Error ? error.message : String(error);

/** UTF-8 of a text that comes in parts, which may be cut within a surrogate pair. */
class TextParts {
  #half = '';

  bytes(part: string, last: boolean): Buffer {
    const text = this.#half + part;
    const cut = !last && (text.charCodeAt(text.length - 1) & 0xfc00) === 0xd800;
    this.#half = cut ? text.slice(-1) : '';
    return Buffer.from(cut ? text.slice(0, -1) : text);
  }
}

function define(
  vm: QuickJSContext,
  name: string,
  call: (...args: string[]) => string | string[] | null,
): void {
  const handle = vm.newFunction(name, (...args) => {
    const result = call(...args.map((arg) => vm.getString(arg)));
    if (result === null) return vm.undefined;
    if (typeof result === 'string') return vm.newString(result);
    const list = vm.newArray();
    result.forEach((text, index) => {
      const item = vm.newString(text);
      vm.setProp(list, index, item);
      item.dispose();
    });
    return list;
  });
  vm.setProp(vm.global, name, handle);
  handle.dispose();
}

/** Error of a guest as text: name, message and stack, whatever the guest threw. */
function guestError(vm: QuickJSContext, error: Parameters<QuickJSContext['dump']>[0]): string {
  try {
    const dumped: unknown = vm.dump(error);
    if (typeof dumped === 'object' && dumped !== null && 'message' in dumped) {
      const { name, message, stack } = dumped as Record<string, unknown>;
      return `${name}: ${message}\n${stack ?? ''}`;
    }
    return `uncaught: ${typeof dumped === 'string' ? dumped : JSON.stringify(dumped)}\n`;
  } catch (failure) {
    return `uncaught error that cannot be shown: ${messageOf(failure)}\n`;
  }
}

/** A fault as JSON text, for the guest to throw. */
const fault = (path: string, error: unknown) => {
  if (!(error instanceof FileFault)) throw error;
  return JSON.stringify(`${JSON.stringify(path)}: ${error.message}`);
};

/** What a snippet may do with files: whole texts, as UTF-8. */
function defineFiles(vm: QuickJSContext, files: MemoryFiles): void {
  let texts = new TextParts();
  let parts: Buffer[] = [];
  let held = 0;
  define(vm, '__read', (packed) => {
    const path: string = JSON.parse(packed!);
    try {
      const node = files.node(files.resolve(byteString(path), true));
      if (node.kind === 'directory') throw new FileFault('EISDIR');
      return ['', JSON.stringify(node.kind === 'file' ? Buffer.from(node.data).toString() : '')];
    } catch (error) {
      return [fault(path, error), ''];
    }
  });
  const store = (path: string) => {
    const full = files.resolveNew(byteString(path));
    const before = files.at(full);
    if (before?.kind === 'null') return;
    const mode = before?.kind === 'file' ? before.mode : 0o644;
    const data = Uint8Array.from(Buffer.concat(parts));
    files.set(full, { kind: 'file', data, mode, modifiedMs: Date.now() });
  };
  define(vm, '__store', (packed, part, last) => {
    const path: string = JSON.parse(packed!);
    let error: string | null = null;
    try {
      parts.push(texts.bytes(JSON.parse(part!), last !== ''));
      held += parts.at(-1)!.length;
      if (held > files.limits.diskBytes) throw new FileFault('ENOSPC');
      if (!last) return null;
      store(path);
    } catch (thrown) {
      error = fault(path, thrown);
    }
    texts = new TextParts();
    parts = [];
    held = 0;
    return error;
  });
}

type Ended = Omit<SnippetResult, 'totals'>;

/** QuickJS. Every snippet has a runtime and a context of its own, so nothing is left of the one before. */
export class QuickJs {
  #module: QuickJSWASMModule | null = null;

  async load(): Promise<void> {
    this.#module ??= await newQuickJSWASMModule();
  }

  /** Runs one and survives what breaks the module: a trap in it ends the module, not the process. */
  async run(
    snippet: Snippet,
    memoryBytes: number,
    files: MemoryFiles,
    output: (stream: 1 | 2, chunk: Buffer) => void,
  ): Promise<Ended> {
    await this.load();
    const started = performance.now();
    try {
      return runIn(this.#module!, snippet, memoryBytes, files, output);
    } catch (error) {
      this.#module = null;
      const ms = performance.now() - started;
      const text = `the interpreter failed: ${messageOf(error)}\n`;
      // Seen when a runtime that was interrupted in the middle of its jobs is taken down.
      const late = ms >= snippet.timeoutMs;
      const memory = !late && /memory/i.test(text);
      output(2, Buffer.from(text));
      const cause = late ? 'timeout' : memory ? 'out_of_memory' : 'exited';
      return ended(cause, cause === 'exited' ? 1 : null, ms);
    }
  }
}

function ended(cause: Ended['cause'], code: number | null, ms: number): Ended {
  const memory = cause === 'out_of_memory';
  return { cause, code, signal: code === null ? 'SIGKILL' : null, ms, memory };
}

function runIn(
  quickjs: QuickJSWASMModule,
  snippet: Snippet,
  memoryBytes: number,
  files: MemoryFiles,
  output: (stream: 1 | 2, chunk: Buffer) => void,
): Ended {
  const started = performance.now();
  const deadline = started + snippet.timeoutMs;
  let late = false;
  const runtime = quickjs.newRuntime();
  runtime.setMemoryLimit(memoryBytes);
  runtime.setMaxStackSize(MAX_STACK_BYTES);
  runtime.setInterruptHandler(() => {
    late ||= performance.now() > deadline;
    return late;
  });
  const vm = runtime.newContext();
  let failure: string | null = null;
  const check = (result: ReturnType<QuickJSContext['evalCode']>) => {
    if (result.error) {
      failure = guestError(vm, result.error);
      result.error.dispose();
    } else result.value.dispose();
  };
  const texts = { 1: new TextParts(), 2: new TextParts() };
  define(vm, '__write', (to, part, last) => {
    const stream = to === '2' ? 2 : 1;
    output(stream, texts[stream].bytes(JSON.parse(part!), last !== ''));
    return null;
  });
  defineFiles(vm, files);
  const stdin = vm.newString(JSON.stringify(snippet.stdin));
  vm.setProp(vm.global, '__stdin', stdin);
  stdin.dispose();
  check(vm.evalCode(PRELUDE, 'prelude.js'));
  if (failure === null) check(vm.evalCode(snippet.source, 'snippet.js'));
  while (failure === null && runtime.hasPendingJob() && !late) {
    const jobs = runtime.executePendingJobs(1000);
    if (jobs.error) {
      failure = guestError(vm, jobs.error);
      jobs.error.dispose();
    }
  }
  vm.dispose();
  runtime.dispose();
  // Set in the closure above, which the compiler does not follow.
  const text = failure as string | null;
  if (text !== null && !late) output(2, Buffer.from(text));
  const memory = text?.includes('out of memory') ?? false;
  const cause = late ? 'timeout' : memory ? 'out_of_memory' : 'exited';
  const code = cause !== 'exited' ? null : text === null ? 0 : 1;
  return ended(cause, code, performance.now() - started);
}
