import {
  newQuickJSWASMModule,
  type QuickJSContext,
  type QuickJSWASMModule,
} from 'quickjs-emscripten';
import { byteString, FileFault, type MemoryFiles } from './files.ts';
import type { Snippet, SnippetResult } from './protocol.ts';

const MAX_STACK_BYTES = 256 * 1024;

/**
 * Defined inside: the host offers strings only. What it needs of the built-ins is taken before the
 * snippet can change them. Long texts go in parts, so that none is a large string of the host, and no
 * part ends within a surrogate pair. Strings cross as C strings: NUL goes as 1 1, and 1 as 1 2.
 */
const PRELUDE = `(() => {
  const write = globalThis.__write, read = globalThis.__read, store = globalThis.__store;
  const packedStdin = globalThis.__stdin;
  delete globalThis.__write; delete globalThis.__read; delete globalThis.__store; delete globalThis.__stdin;
  const call = Function.prototype.call;
  const slice = call.bind(String.prototype.slice), code = call.bind(String.prototype.charCodeAt);
  const PART = 1 << 20;
  const parts = (text, give) => {
    for (let at = 0; ; ) {
      let end = at + PART;
      if (end < text.length && (code(text, end - 1) & 0xfc00) === 0xd800) end--;
      const error = give(pack(slice(text, at, end)), end >= text.length);
      if (error || end >= text.length) return error;
      at = end;
    }
  };
  const split = call.bind(String.prototype.split), join = call.bind(Array.prototype.join);
  const has = call.bind(String.prototype.includes);
  const swap = (text, from, to) => has(text, from) ? join(split(text, from), to) : text;
  const pack = (text) => swap(swap(text, '\\x01', '\\x01\\x02'), '\\0', '\\x01\\x01');
  const unpack = (text) => swap(swap(text, '\\x01\\x01', '\\0'), '\\x01\\x02', '\\x01');
  const show = (value) => {
    if (typeof value === 'string') return value;
    if (value instanceof Error) return String(value) + '\\n' + (value.stack ?? '');
    if (typeof value === 'object' && value !== null) {
      try { return JSON.stringify(value) ?? String(value); } catch { return String(value); }
    }
    return String(value);
  };
  const line = (to) => (...values) => { parts(values.map(show).join(' ') + '\\n', (part) => write(to, part)); };
  globalThis.print = line('1');
  globalThis.console = { log: line('1'), info: line('1'), debug: line('1'), warn: line('2'), error: line('2') };
  const stdin = unpack(packedStdin);
  globalThis.readStdin = () => stdin;
  globalThis.readFile = (path) => {
    const [error, text] = read(pack(String(path)));
    if (error) throw new Error(error);
    return unpack(text);
  };
  globalThis.writeFile = (path, text) => {
    const name = pack(String(path));
    const error = parts(String(text), (part, last) => store(name, part, last ? 'last' : ''));
    if (error) throw new Error(error);
  };
})()`;

export const messageOf = (error: unknown) =>
  error instanceof Error ? error.message : String(error);

const pack = (text: string) => text.replaceAll('\x01', '\x01\x02').replaceAll('\0', '\x01\x01');
const unpack = (text: string) => text.replaceAll('\x01\x01', '\0').replaceAll('\x01\x02', '\x01');

function define(
  vm: QuickJSContext,
  name: string,
  call: (...args: string[]) => string | string[] | null,
): void {
  const handle = vm.newFunction(name, (...args) => {
    const result = call(...args.map((arg) => unpack(vm.getString(arg))));
    if (result === null) return vm.undefined;
    if (typeof result === 'string') return vm.newString(pack(result));
    const list = vm.newArray();
    result.forEach((text, index) => {
      const item = vm.newString(pack(text));
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

const fault = (path: string, error: unknown) => {
  if (!(error instanceof FileFault)) throw error;
  return `${JSON.stringify(path)}: ${error.message}`;
};

/** What a snippet may do with files: whole texts, as UTF-8. */
function defineFiles(vm: QuickJSContext, files: MemoryFiles): void {
  let parts: Buffer[] = [];
  let held = 0;
  define(vm, '__read', (path) => {
    try {
      const node = files.node(files.resolve(byteString(path!), true));
      if (node.kind === 'directory') throw new FileFault('EISDIR');
      return ['', node.kind === 'file' ? Buffer.from(node.data).toString() : ''];
    } catch (error) {
      return [fault(path!, error), ''];
    }
  });
  define(vm, '__store', (path, part, last) => {
    try {
      parts.push(Buffer.from(part!));
      held += parts.at(-1)!.length;
      if (held > files.limits.diskBytes) throw new FileFault('ENOSPC');
      if (!last) return null;
      const full = files.resolveNew(byteString(path!));
      const before = files.at(full);
      if (before?.kind !== 'null') {
        const mode = before?.kind === 'file' ? before.mode : 0o644;
        const data = Uint8Array.from(Buffer.concat(parts));
        files.set(full, { kind: 'file', data, mode, modifiedMs: Date.now() });
      }
    } catch (error) {
      parts = [];
      held = 0;
      return fault(path!, error);
    }
    parts = [];
    held = 0;
    return null;
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
  define(vm, '__write', (to, text) => {
    output(to === '2' ? 2 : 1, Buffer.from(text!));
    return null;
  });
  defineFiles(vm, files);
  const stdin = vm.newString(pack(snippet.stdin));
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
