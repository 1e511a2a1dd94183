import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import type { MemoryNode } from './files.ts';
import { ArchiveFault, packTar, unpackTar, withParents } from './tar.ts';

const dir = mkdtempSync(join(tmpdir(), 'longhaul-tar-'));
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const byteName = (text: string) => Buffer.from(text).toString('latin1');
const file = (text: string, mode = 0o644): MemoryNode => ({
  kind: 'file',
  data: new Uint8Array(Buffer.from(text)),
  mode,
  modifiedMs: 1_700_000_000_250,
});
const NODES: [string, MemoryNode][] = [
  ['/workspace/a', file('one', 0o755)],
  ['/workspace/dir', { kind: 'directory', mode: 0o700, modifiedMs: 1_700_000_000_000 }],
  [`/workspace/dir/${byteName('ünï 🙂\nnew')}`, file('odd')],
  [`/workspace/dir/${'n'.repeat(255)}`, file('')],
  ['/workspace/link', { kind: 'symlink', target: '/etc/passwd', modifiedMs: 1_700_000_000_000 }],
  ['/workspace/\xff\xfe', file('x'.repeat(1000))],
];
const pack = (nodes: [string, MemoryNode][]) => Buffer.concat([...packTar(nodes, '/workspace/')]);
const unpack = (bytes: Uint8Array) => unpackTar(bytes, { prefix: '/workspace/' });

test('what is packed comes out again, whatever its name is', () => {
  expect(unpack(pack(NODES))).toEqual(NODES);
});

/** An archive that Python's tarfile writes. */
const byPython = (script: string) =>
  execFileSync(
    'python3',
    [
      '-c',
      `import io, sys, tarfile
out = io.BytesIO()
tar = tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape")
def add(name, kind=tarfile.REGTYPE, link="", data=b""):
    info = tarfile.TarInfo(name); info.type = kind; info.linkname = link; info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
${script}
tar.close()
sys.stdout.buffer.write(out.getvalue())`,
    ],
    { maxBuffer: 2 ** 26 },
  );

test('Python reads it, and the other way round', () => {
  const listed = execFileSync(
    'python3',
    [
      '-c',
      `import io, os, sys, tarfile
for m in tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read()), errors="surrogateescape"):
    print([os.fsencode(m.name).hex(), m.size, m.mode, m.type.decode(), m.linkname, m.mtime])`,
    ],
    { input: pack(NODES), encoding: 'utf8' },
  );
  const hex = (text: string) => Buffer.from(text, 'latin1').toString('hex');
  for (const [path] of NODES) expect(listed).toContain(hex(path.slice('/workspace/'.length)));
  expect(listed).toContain(`'/etc/passwd'`);
  expect(listed).toContain('1700000000.25');
  const names = unpack(
    byPython(`add("ok", data=b"1")
add("dir", tarfile.DIRTYPE)
add("dir/" + "d" * 200 + "/ünï", data=b"2")
add(os.fsdecode(b"\\xff\\xfe"), data=b"3") if (os := __import__("os")) else None
add("hard", tarfile.LNKTYPE, "ok")`),
  );
  expect(names.map(([path]) => path)).toEqual([
    '/workspace/ok',
    '/workspace/dir',
    `/workspace/dir/${'d'.repeat(200)}/${byteName('ünï')}`,
    '/workspace/\xff\xfe',
    '/workspace/hard',
  ]);
  expect(names[4]![1]).toMatchObject({ kind: 'file', data: Uint8Array.of(0x31) });
});

describe('hostile members', () => {
  test.each([
    ['an absolute name', 'add("/etc/cron.d/x", data=b"1")', /absolute/],
    ['a name with ..', 'add("a/../../x", data=b"1")', /\.\./],
    ['a name that is ..', 'add("..", tarfile.DIRTYPE)', /\.\./],
    ['a hard link to the host', 'add("h", tarfile.LNKTYPE, "/etc/passwd")', /absolute/],
    ['a hard link upward', 'add("h", tarfile.LNKTYPE, "../x")', /\.\./],
    ['a hard link to nothing', 'add("h", tarfile.LNKTYPE, "none")', /outside/],
    [
      'a hard link to a directory',
      'add("d", tarfile.DIRTYPE); add("h", tarfile.LNKTYPE, "d")',
      /outside/,
    ],
    ['a name twice', 'add("a", data=b"1"); add("./a", data=b"2")', /twice/],
    ['an unknown kind', 'add("a", b"Z")', /not known/],
    ['an empty name', 'add("", data=b"1")', /no name/],
  ])('%s: refused', (_, script, message) => {
    const archive = byPython(script);
    expect(() => unpack(archive)).toThrow(ArchiveFault);
    expect(() => unpack(archive)).toThrow(message);
  });

  test('devices, pipes and the root itself are left out', () => {
    const archive = byPython(
      'add("./", tarfile.DIRTYPE); add("c", tarfile.CHRTYPE); add("b", tarfile.BLKTYPE); add("p", tarfile.FIFOTYPE); add("f", data=b"1")',
    );
    expect(unpack(archive).map(([path]) => path)).toEqual(['/workspace/f']);
  });

  test('a link is text, and nothing can be put below it', () => {
    const archive = byPython('add("l", tarfile.SYMTYPE, "/etc"); add("l/passwd", data=b"1")');
    expect(() => withParents(unpack(archive), '/workspace')).toThrow(/not a directory/);
  });

  test('cut short at every block, or with any byte of a header changed', () => {
    const archive = pack(NODES.slice(0, 2));
    for (let end = 0; end < archive.length - 512; end += 512)
      expect(() => unpack(archive.subarray(0, end)), `cut at ${end}`).toThrow(ArchiveFault);
    for (let at = 0; at < 512; at++) {
      const changed = Buffer.from(archive);
      changed[at] = changed[at]! ^ 0x15;
      expect(() => unpack(changed), `byte ${at}`).toThrow(ArchiveFault);
    }
  });

  test('extended headers that lie', () => {
    for (const record of ['9999 path=x\n', '0 path=x\n', 'x path=x\n', '11 nothing\n', '']) {
      const archive = pack([['/workspace/a', file('1')]]);
      const bytes = Buffer.from(archive);
      bytes.fill(0, 512, 1024);
      bytes.write(record.padEnd(20, '7'), 512, 'latin1');
      expect(() => unpack(bytes), JSON.stringify(record)).toThrow(ArchiveFault);
    }
  });
});
