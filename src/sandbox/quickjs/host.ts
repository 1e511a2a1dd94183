import { createInterface } from 'node:readline';
import {
  newQuickJSWASMModule,
  type QuickJSContext,
  type QuickJSWASMModule,
} from 'quickjs-emscripten';
import { KeptOutput } from '../output.ts';
import { type MemoryFiles, memoryRead, memoryWrite } from './files.ts';
import type { SnippetAnswer, SnippetBatch, SnippetResult } from './protocol.ts';

/**
 * The process that runs JavaScript snippets: started with an empty environment and without rights to
 * files, processes or threads. Each snippet gets a runtime and a context of its own, so nothing is
 * left of the one before.
 */

const MAX_STACK_BYTES = 256 * 1024;

/** Defined inside: the host offers strings only. */
const PRELUDE = `(() => {
  const write = globalThis.__write, read = globalThis.__read, store = globalThis.__store;
  const stdin = globalThis.__stdin;
  delete globalThis.__write; delete globalThis.__read; delete globalThis.__store; delete globalThis.__stdin;
  const show = (value) => {
    if (typeof value === 'string') return value;
    if (value instanceof Error) return String(value) + '\\n' + (value.stack ?? '');
    if (typeof value === 'object' && value !== null) {
      try { return JSON.stringify(value) ?? String(value); } catch { return String(value); }
    }
    return String(value);
  };
  const line = (to) => (...values) => write(to, values.map(show).join(' ') + '\\n');
  globalThis.print = line(1);
  globalThis.console = { log: line(1), info: line(1), debug: line(1), warn: line(2), error: line(2) };
  globalThis.readStdin = () => stdin;
  globalThis.readFile = (path) => {
    const [error, text] = read(String(path));
    if (error) throw new Error(error);
    return text;
  };
  globalThis.writeFile = (path, text) => {
    const error = store(String(path), String(text));
    if (error) throw new Error(error);
  };
})()`;

let module: QuickJSWASMModule | null = null;

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

const messageOf = (error: unknown) => (error instanceof Error ? error.message : String(error));

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

function run(
  quickjs: QuickJSWASMModule,
  batch: SnippetBatch,
  snippet: SnippetBatch['snippets'][number],
  files: MemoryFiles,
  written: Set<string>,
): SnippetResult {
  const started = performance.now();
  const deadline = started + snippet.timeoutMs;
  const outputs = [new KeptOutput(batch.keepBytes), new KeptOutput(batch.keepBytes)] as const;
  let late = false;
  const runtime = quickjs.newRuntime();
  runtime.setMemoryLimit(batch.memoryBytes);
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
    outputs[to === '2' ? 1 : 0].add(Buffer.from(text!));
    return null;
  });
  define(vm, '__read', (path) => {
    try {
      return ['', Buffer.from(memoryRead(files, path!, Number.POSITIVE_INFINITY)).toString()];
    } catch (error) {
      return [messageOf(error), ''];
    }
  });
  define(vm, '__store', (path, text) => {
    try {
      memoryWrite(files, path!, Buffer.from(text!), batch);
      written.add(path!);
      return null;
    } catch (error) {
      return messageOf(error);
    }
  });
  const stdin = vm.newString(snippet.stdin);
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
  if (text !== null && !late) outputs[1].add(Buffer.from(text));
  const memory = text?.includes('out of memory') ?? false;
  return {
    cause: late ? 'timeout' : memory ? 'out_of_memory' : 'exited',
    code: late || memory ? null : text === null ? 0 : 1,
    stdout: outputs[0].data(),
    stderr: outputs[1].data(),
    ms: performance.now() - started,
  };
}

/** Runs one and survives what breaks the module: a trap in it ends the module, not the process. */
async function runGuarded(
  batch: SnippetBatch,
  snippet: SnippetBatch['snippets'][number],
  files: MemoryFiles,
  written: Set<string>,
): Promise<SnippetResult> {
  module ??= await newQuickJSWASMModule();
  const started = performance.now();
  try {
    return run(module, batch, snippet, files, written);
  } catch (error) {
    module = null;
    const text = `the interpreter failed: ${messageOf(error)}\n`;
    // Seen when a runtime that was interrupted in the middle of its jobs is taken down.
    const late = performance.now() - started >= snippet.timeoutMs;
    const memory = !late && /memory/i.test(text);
    const bytes = Buffer.from(text).toString('base64');
    return {
      cause: late ? 'timeout' : memory ? 'out_of_memory' : 'exited',
      code: late || memory ? null : 1,
      stdout: { head: '', tail: '', total: 0 },
      stderr: { head: bytes, tail: '', total: text.length },
      ms: performance.now() - started,
    };
  }
}

async function serve(): Promise<void> {
  module = await newQuickJSWASMModule();
  process.stdout.write('{"ready":true}\n');
  for await (const line of createInterface({ input: process.stdin })) {
    const batch: SnippetBatch = JSON.parse(line);
    const files: MemoryFiles = new Map(
      batch.files.map(([path, content]) => [path, Buffer.from(content, 'base64')]),
    );
    for (const [index, snippet] of batch.snippets.entries()) {
      const written = new Set<string>();
      const result = await runGuarded(batch, snippet, files, written);
      const answer: SnippetAnswer = {
        id: batch.id,
        index,
        result,
        written: [...written].map((path) => [
          path,
          Buffer.from(memoryRead(files, path, Number.POSITIVE_INFINITY)).toString('base64'),
        ]),
        heldBytes: process.memoryUsage.rss(),
      };
      process.stdout.write(`${JSON.stringify(answer)}\n`);
    }
  }
}

await serve();
