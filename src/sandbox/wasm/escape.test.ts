import { execFileSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { CodeRequest, ExecResult } from '../../core/index.ts';
import type { Sandbox } from '../contract.ts';
import { WasmDriver } from './driver.ts';
import { restrictions } from './process.ts';

/** Attempts to get out of, use up or confuse the wasm sandbox. After each one the sandbox must go on. */

const home = mkdtempSync(join(tmpdir(), 'longhaul-wasm-escape-'));
const SECRET = 'host secret 5f1c';
const hostFile = join(home, 'secret');
afterAll(() => rmSync(home, { recursive: true, force: true }));

interface Attempt {
  name: string;
  language: CodeRequest['language'];
  source: string | (() => string);
  timeoutMs?: number;
  held: (result: ExecResult) => void;
}

const SPEC = {
  memoryBytes: 96 * 1024 * 1024,
  diskBytes: 4 * 1024 * 1024,
  inodes: 500,
};
let port = 0;

const prints = (pattern: RegExp) => (result: ExecResult) => expect(result.stdout).toMatch(pattern);
const fails = (pattern: RegExp) => (result: ExecResult) => {
  expect(result.code).toBe(1);
  expect(result.stderr).toMatch(pattern);
};
const ends = (cause: ExecResult['cause']) => (result: ExecResult) =>
  expect(result).toMatchObject({ cause, code: null });
const js = (name: string, source: Attempt['source'], held: Attempt['held'], timeoutMs = 20_000) =>
  ({ name, language: 'javascript', source, held, timeoutMs }) as const;
const py = (name: string, source: Attempt['source'], held: Attempt['held'], timeoutMs = 20_000) =>
  ({ name, language: 'python', source, held, timeoutMs }) as const;

const HOST_NAMES =
  'process require module fetch WebAssembly Worker Deno Bun Buffer setTimeout importScripts __write __read __store __stdin';

const attempts: Attempt[] = [
  // Host files
  js('host file by its path', () => `readFile(${JSON.stringify(hostFile)})`, fails(/no such file/)),
  js('host file by dots', 'readFile("../../../../etc/passwd")', fails(/no such file/)),
  js(
    'import of a host module',
    'import("node:fs").then(print, (e) => print("no", e.message))',
    prints(/^no /),
  ),
  js(
    'import of a host file',
    () => `import(${JSON.stringify(hostFile)}).then(print, () => print("no"))`,
    prints(/^no/),
  ),
  js('writing outside the workspace', 'writeFile("/etc/passwd", "x")', fails(/read-only/)),
  js('writing over what the interpreter brings', 'writeFile("/dev/new", "x")', fails(/read-only/)),
  py(
    'host file by its path',
    () => `open(${JSON.stringify(hostFile)})`,
    fails(/FileNotFoundError/),
  ),
  py('host file by dots', 'open("../../../../etc/passwd")', fails(/FileNotFoundError/)),
  py(
    'host file through a link',
    'import os\nos.symlink("/etc/passwd", "l1"); open("l1")',
    fails(/FileNotFoundError/),
  ),
  py(
    'link that leads to itself',
    'import os\nos.symlink("l2", "l2"); open("l2")',
    fails(/OSError.*32/),
  ),
  py('host file by /proc', 'open("/proc/self/environ")', fails(/FileNotFoundError/)),
  py(
    'everything that can be seen',
    () =>
      `import os\nnames = [n for _, d, f in os.walk("/", followlinks=False) for n in d + f]\nprint("secret" in names, "passwd" in names, "python3.11" in names)`,
    prints(/^False False False$/m),
  ),
  py(
    'directory above the root',
    'import os\nos.chdir("/..")\nprint(sorted(os.listdir("..")))',
    prints(/^\['dev', 'tmp', 'workspace'\]$/m),
  ),
  // The library lies in the interpreter's own memory; what it does not know how to change ends it.
  py(
    'writing the standard library',
    'open("/usr/local/lib/python3.11/os.py", "w").write("x")',
    (result) => expect(result.code).not.toBe(0),
  ),
  py(
    'replacing the standard library',
    'import os\nos.rename("/usr/local/lib/python311.zip", "/workspace/lib")',
    (result) => expect(result.code).not.toBe(0),
  ),
  py(
    'the standard library after that',
    'import json, re\nprint(json.dumps([1]))',
    prints(/^\[1\]$/m),
  ),
  py(
    'removing the workspace itself',
    'import os\nos.chdir("/")\nos.rmdir("/workspace")',
    fails(/OSError/),
  ),
  py(
    'opening descriptors that nobody gave',
    'import os\nseen = []\nfor fd in range(4, 300):\n  try:\n    os.fstat(fd); seen.append(fd)\n  except OSError: pass\nprint(seen)',
    // 4 is the library in the interpreter's own memory.
    prints(/^\[4\]$/m),
  ),
  // Processes, network, environment
  js(
    'names of the host',
    `print(${JSON.stringify(HOST_NAMES.split(' '))}.filter((n) => n in globalThis))`,
    prints(/^\[\]$/m),
  ),
  js(
    'the host through a constructor',
    'print((() => {}).constructor("return typeof process + typeof require")())',
    prints(/^undefinedundefined$/m),
  ),
  js(
    'the host through an error of a host call',
    'try { readFile({ toString() { throw 1 } }) } catch (e) { print(typeof e, e.constructor?.constructor?.("return typeof process")() ?? "none") }',
    prints(/^number undefined$/m),
  ),
  js(
    "the host through a host call's prototype",
    'print(readFile.constructor("return typeof process")(), print.constructor("return this === globalThis")())',
    prints(/^undefined true$/m),
  ),
  py('a process', 'import subprocess\nsubprocess.run(["id"])', fails(/does not support processes/)),
  py(
    'os.system and fork',
    'import os\nprint([hasattr(os, n) for n in ("system", "fork", "execv", "posix_spawn", "kill")])',
    prints(/False/),
  ),
  py(
    'a thread',
    'import threading\nthreading.Thread(target=print).start()',
    fails(/can't start new thread/),
  ),
  py(
    'a connection to the host',
    () => `import socket\nsocket.create_connection(("127.0.0.1", ${port}), 2)`,
    fails(/Error/),
  ),
  py(
    'accepting on descriptor 3',
    'import socket\nsocket.socket(fileno=3).accept()',
    fails(/Error/),
  ),
  py('native code', 'import ctypes', fails(/No module named/)),
  py(
    'the environment',
    'import os\nprint(sorted(os.environ))',
    prints(/^\['HOME', 'LANG', 'PYTHONUTF8', 'TMPDIR'\]$/m),
  ),
  py(
    'the identity of the host',
    'import os\nprint(hasattr(os, "getuid"), os.getpid(), os.uname().sysname)',
    prints(/wasi|False/),
  ),
  // Exhaustion
  js(
    'memory bomb',
    'const a = []; while (true) a.push(new ArrayBuffer(1 << 20))',
    ends('out_of_memory'),
  ),
  js('doubling strings', 'let s = "xxxxxxxx"; while (true) s = s + s + "y"', (result) =>
    expect(result.code).not.toBe(0),
  ),
  js('huge string to the host', 'print("é".repeat(20e6))', (result) => {
    expect(result.stdoutBytes).toBe(40_000_001);
    expect(result.stdout.length).toBeLessThan(300_000);
  }),
  js(
    'huge array of names',
    'for (;;) readFile("x".repeat(1e6))',
    fails(/File name too long|name too long/i),
  ),
  js('deep recursion', 'const f = () => f(); f()', fails(/stack|recursion/i)),
  js(
    'deep recursion in JSON',
    'let a = []; for (let i = 0; i < 1e6; i++) a = [a]; JSON.stringify(a)',
    (result) => expect(result.code).not.toBe(0),
  ),
  js('endless loop', 'while (true);', ends('timeout'), 300),
  js(
    'endless promise chain',
    'const p = () => Promise.resolve().then(p); p()',
    ends('timeout'),
    300,
  ),
  js('endless regular expression', '/(a+)+$/.test("a".repeat(50) + "b")', ends('timeout'), 300),
  js(
    'endless loop in a sort callback',
    '[3, 2, 1].sort(() => { for (;;); })',
    ends('timeout'),
    300,
  ),
  js(
    'endless loop in toString for the host',
    'readFile({ toString() { for (;;); } })',
    ends('timeout'),
    300,
  ),
  js(
    'waiting for ever',
    'if (typeof Atomics === "undefined") throw new Error("no Atomics"); Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)',
    (result) => expect(result.code).not.toBe(0),
    500,
  ),
  js('output flood', 'for (let i = 0; i < 2e5; i++) print("x".repeat(100))', (result) => {
    expect(result.stdoutBytes).toBe(20_200_000);
    expect(result.stdout).toMatch(/bytes left out/);
  }),
  js(
    'file-count bomb',
    'let n = 0; try { for (;;) writeFile("many/" + n++, "") } catch (e) { print(n < 500, e.message) }',
    prints(/^true .*no space left/m),
  ),
  py(
    'the files of the bomb',
    'import shutil\nshutil.rmtree("many"); print("gone")',
    prints(/gone/),
  ),
  js(
    'disk bomb',
    'let s = ""; try { for (let i = 0; ; i++) writeFile("big" + i, "x".repeat(1e6)) } catch (e) { print(e.message) }',
    prints(/no space left/),
  ),
  py(
    'the files of the disk bomb',
    'import os\nfor n in os.listdir("."):\n  if n.startswith("big"): os.remove(n)\nprint("gone")',
    prints(/gone/),
  ),
  py('memory bomb', 'a = []\nwhile True: a.append(bytearray(1 << 20))', (result) => {
    expect(result).toMatchObject({ code: 1, limitsHit: ['memory'] });
    expect(result.stderr).toMatch(/MemoryError/);
  }),
  py('one huge object', 'bytearray(1 << 31 - 1)', fails(/MemoryError|OverflowError/)),
  py('deep recursion', 'f = lambda: f()\nf()', fails(/RecursionError/)),
  py(
    "deep recursion without Python's limit",
    'import sys\nsys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()',
    (result) => expect(result.code).not.toBe(0),
  ),
  py('deep recursion in the parser', 'eval("(" * 100000 + ")" * 100000)', (result) =>
    expect(result.code).not.toBe(0),
  ),
  py('endless loop', 'while True: pass', ends('timeout'), 300),
  py('endless computation in C', '(1 << (1 << 24)) ** 3 % 7; 10 ** 10 ** 8', ends('timeout'), 300),
  py('sleeping past the deadline', 'import time\ntime.sleep(100)', ends('timeout'), 300),
  py(
    'endless regular expression',
    'import re\nre.match("(a+)+$", "a" * 50 + "b")',
    ends('timeout'),
    300,
  ),
  py(
    'loop that catches everything',
    'while True:\n  try:\n    while True: pass\n  except BaseException: pass',
    ends('timeout'),
    300,
  ),
  py(
    'disk bomb',
    'f = open("big", "wb")\ntry:\n  while True: f.write(b"x" * 65536); f.flush()\nexcept OSError as e: print(e.errno == 51, f.tell() <= 4 << 20)',
    prints(/^True True$/m),
  ),
  py(
    'disk bomb in files that have no name any more',
    'import os\nos.remove("big")\nheld = []\ntry:\n  while True:\n    f = open("x", "wb", 0); f.write(b"x" * 262144); os.remove("x"); held.append(f)\nexcept OSError as e: print(e.errno == 51, len(held) < 17)',
    prints(/^True True$/m),
  ),
  py(
    'sparse disk bomb',
    'f = open("s", "wb")\ntry: f.seek(1 << 40); f.write(b"x"); f.flush()\nexcept OSError as e: print(e.errno == 51)\nfinally:\n  import os; os.ftruncate(f.fileno(), 0)',
    (result) => expect(result.stdout).toMatch(/^True$/m),
  ),
  py(
    'descriptor bomb',
    'held = []\ntry:\n  while True: held.append(open("/dev/null"))\nexcept OSError as e: print(e.errno == 33, len(held) < 1024)',
    prints(/^True True$/m),
  ),
  py(
    'file-count bomb',
    'n = 0\nimport os, shutil\nos.mkdir("many")\ntry:\n  while True: open("many/%d" % n, "w").close(); n += 1\nexcept OSError as e: print(n < 500, e.errno == 51)\nshutil.rmtree("many")',
    prints(/^True True$/m),
  ),
  py(
    'link bomb',
    'import os\nn = 0\nos.mkdir("links")\ntry:\n  while True: os.symlink("x" * 4000, "links/%d" % n); n += 1\nexcept OSError as e: print(e.errno == 51)\nimport shutil; shutil.rmtree("links")',
    prints(/^True$/m),
  ),
  py(
    'output flood',
    'import sys\nfor i in range(2000): sys.stdout.write("x" * 10000)',
    (result) => {
      expect(result.stdoutBytes).toBe(20_000_000);
      expect(result.stdout).toMatch(/bytes left out/);
    },
  ),
  // Confusion
  js(
    'polluting prototypes',
    'Object.prototype.polluted = 1; Array.prototype.map = null; globalThis.leak = 1; JSON.stringify = () => "x"',
    (result) => expect(result.code).toBe(0),
  ),
  js(
    'what is left of that',
    'print(({}).polluted, typeof [].map, "leak" in globalThis, JSON.stringify({}))',
    prints(/^undefined function false \{\}$/m),
  ),
  js(
    'spoiling what print needs',
    'String.prototype.slice = () => "bad"; String.prototype.charCodeAt = () => 0; Array.prototype.join = () => "joined"; Function.prototype.call = null; print("a")',
    prints(/joined|^a$/m),
  ),
  js(
    'pretending to be a frame of the protocol',
    'print("\\u0000\\u0000\\u0000\\u0002\\u0000\\u0000\\u0000\\u0000{}")',
    prints(/\{\}/),
  ),
  js('throwing what cannot be shown', 'throw { get message() { throw 1 } }', (result) =>
    expect(result.code).toBe(1),
  ),
  js(
    'half a character',
    'print("🙂".repeat(600000).length)\nprint("a" + "🙂".repeat(600000))',
    (result) => expect(result.stdout).not.toContain('\ufffd'),
  ),
  py(
    'residue in the interpreter',
    'import builtins, sys\nbuiltins.leak = 1; sys.modules["json"] = None; sys.path.clear()',
    (result) => expect(result.code).toBe(0),
  ),
  py(
    'what is left of that',
    'import builtins, json\nprint(hasattr(builtins, "leak"), json.dumps(1))',
    prints(/^False 1$/m),
  ),
  py(
    'names of what started it',
    'print([n for n in globals() if not n.startswith("__")])',
    prints(/^\[\]$/m),
  ),
  py('an exit code beyond a byte', 'import os\nos._exit(70000)', (result) =>
    expect(result.code).toBe(70_000 & 0xff),
  ),
  py('aborting', 'import os\nos.abort()', (result) =>
    expect(result).toMatchObject({ cause: 'signalled', signal: 'SIGABRT' }),
  ),
  py(
    'names with newline, 255 bytes and invalid UTF-8',
    'import os\nfor n in (b"a\\nb", b"\\xff\\xfe", b"y" * 255): open(n, "w").close()\ntry: open(b"z" * 256, "w")\nexcept OSError as e: print(e.errno == 37, sorted(os.listdir(b"."))[-1] == b"\\xff\\xfe")',
    prints(/^True True$/m),
  ),
];

describe('escape attempts on wasm', () => {
  let driver: WasmDriver;
  let sandbox: Sandbox;
  let server: Server;

  beforeAll(async () => {
    writeFileSync(hostFile, SECRET);
    process.env.LONGHAUL_TEST_SECRET = SECRET;
    server = createServer((_, response) => response.end(SECRET));
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    port = (server.address() as { port: number }).port;
    driver = await WasmDriver.open({ dir: join(home, 'driver'), processes: 2 });
    sandbox = await driver.create(SPEC);
  });

  afterAll(async () => {
    await driver?.close();
    server?.close();
    delete process.env.LONGHAUL_TEST_SECRET;
  });

  test.each(attempts)(
    '$language: $name',
    async ({ language, source, timeoutMs = 20_000, held }) => {
      const text = typeof source === 'string' ? source : source();
      const [result, after] = await sandbox.runCode([
        { language, source: text, timeoutMs },
        { language: 'javascript', source: 'print("still here")' },
      ]);
      expect(result!.stdout + result!.stderr).not.toContain(SECRET);
      held(result!);
      expect(after!.stdout).toBe('still here\n');
    },
  );

  test('names of both languages and the file calls are the same bytes', async () => {
    const entries = await sandbox.listFiles('.');
    const odd = entries.find(({ rawName }) => rawName);
    expect(odd).toEqual({
      name: '\ufffd\ufffd',
      rawName: Uint8Array.of(0xff, 0xfe),
      kind: 'file',
      bytes: 0,
    });
    expect(await sandbox.readFile(odd!.rawName!)).toEqual(new Uint8Array());
    expect(entries.map(({ name }) => name)).toContain('a\nb');
  });

  test('the bombs are counted', async () => {
    const usage = await sandbox.usage();
    expect(usage.oomKills).toBeGreaterThanOrEqual(2);
    expect(usage.diskBytes).toBeLessThanOrEqual(SPEC.diskBytes);
    expect(usage.cpuSeconds).toBeGreaterThan(0.3);
    expect(usage.peakMemoryBytes).toBeGreaterThan(SPEC.memoryBytes / 2);
  });
});

describe('code that got out of the interpreter', () => {
  /** What it could do: run in a process with the same restrictions. */
  const outside = (source: string) =>
    execFileSync(
      process.execPath,
      [...restrictions(), '--no-warnings', '--input-type=module', '--eval', source],
      { env: {}, cwd: '/', encoding: 'utf8' },
    );
  const refused = (code: string) =>
    outside(`try { ${code}; console.log('WORKED') } catch (e) { console.log(e.code) }`).trim();

  beforeAll(() => writeFileSync(join(tmpdir(), 'longhaul-wasm-canary'), SECRET));
  afterAll(() => rmSync(join(tmpdir(), 'longhaul-wasm-canary'), { force: true }));

  test.each([
    ['reads a host file', `(await import('node:fs')).readFileSync('/etc/passwd')`],
    ['reads /proc', `(await import('node:fs')).readFileSync('/proc/self/environ')`],
    ['lists the root', `(await import('node:fs')).readdirSync('/')`],
    [
      'reads a temporary file',
      `(await import('node:fs')).readFileSync(${JSON.stringify(join(tmpdir(), 'longhaul-wasm-canary'))})`,
    ],
    ['writes a file', `(await import('node:fs')).writeFileSync('/tmp/longhaul-escaped', '')`],
    ['makes a link', `(await import('node:fs')).symlinkSync('/etc', '/tmp/longhaul-escaped')`],
    ['starts a process', `(await import('node:child_process')).spawnSync('id')`],
    ['loads native code', `process.dlopen({ exports: {} }, '/lib/x.node')`],
    [
      'uses WASI of the host',
      `new (await import('node:wasi')).WASI({ version: 'preview1', preopens: { '/': '/' } })`,
    ],
    [
      'starts a thread without restrictions',
      `const { Worker } = await import('node:worker_threads');
       const w = new Worker("require('fs').readFileSync('/etc/passwd')", { eval: true, execArgv: [] });
       await new Promise((_, no) => w.on('error', no))`,
    ],
  ])('%s: refused', (_, code) => {
    expect(refused(code)).toMatch(/^ERR_(ACCESS_DENIED|DLOPEN_DISABLED)$/);
  });

  test('finds an empty environment', () => {
    expect(outside('console.log(JSON.stringify(process.env))').trim()).toBe('{}');
  });

  test('may read code only', () => {
    const allowed = restrictions()
      .filter((each) => each.startsWith('--allow-fs-read='))
      .map((each) => each.slice('--allow-fs-read='.length));
    for (const path of allowed)
      expect(path).toMatch(
        /\/(node_modules\/?|package\.json|src\/(sandbox|core)|dist\/src\/(sandbox|core))$/,
      );
    expect(restrictions().filter((each) => !each.startsWith('--allow-fs-read='))).toEqual([
      '--permission',
    ]);
  });

  test.skipIf(process.platform !== 'linux')(
    'the real process has that environment and those restrictions',
    async () => {
      const driver = await WasmDriver.open({ dir: join(home, 'environment') });
      const children = readdirSync('/proc').filter((pid) => {
        try {
          const parent = /^PPid:\t(\d+)$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1];
          return Number(parent) === process.pid;
        } catch {
          return false;
        }
      });
      const commands = children.map((pid) => readFileSync(`/proc/${pid}/cmdline`, 'utf8'));
      const index = commands.findIndex((command) => /wasm\/host\.[jt]s/.test(command));
      expect(commands[index]!.split('\0')).toEqual(expect.arrayContaining(restrictions()));
      expect(readFileSync(`/proc/${children[index]}/environ`, 'utf8')).toBe('');
      await driver.close();
    },
  );
});
