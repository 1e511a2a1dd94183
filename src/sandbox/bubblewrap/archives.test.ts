import { execFileSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { zstdCompressSync, zstdDecompressSync } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { probeBubblewrap, type Sandbox } from '../index.ts';
import { BubblewrapDriver } from './driver.ts';

/** Layers as archives, and archives that mean harm. They are unpacked inside: the host's files are watched. */

const home = mkdtempSync(join(tmpdir(), 'longhaul-archives-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const skipped = probe.ok ? '' : ` (skipped: ${probe.reason})`;
afterAll(() => rmSync(home, { recursive: true, force: true }));

const sh = async (sandbox: Sandbox, line: string) => {
  const { stdout, stderr } = await sandbox.exec({ argv: ['sh', '-c', line] });
  return stdout + stderr;
};
const bytesOf = async (stream: Readable) => Buffer.concat(await stream.toArray());

/** A zstd archive that a Python script makes with `add(name, **fields)` and raw `tar` at hand. */
function archive(source: string): Buffer {
  const script = `
import io, sys, tarfile
out = io.BytesIO()
tar = tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape")
def add(name, data=b"hostile", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in fields.items(): setattr(member, key, value)
    if member.type != tarfile.REGTYPE: member.size = 0
    tar.addfile(member, io.BytesIO(data))
${source}
tar.close()
sys.stdout.buffer.write(out.getvalue())`;
  const options = { maxBuffer: 1 << 30 };
  return zstdCompressSync(execFileSync('/usr/bin/python3', ['-c', script], options));
}

/** Refused, or unpacked where only the importing sandbox sees it: `inside` says what is there then. */
const HOSTILE: [name: string, source: string, expected: 'refused' | RegExp][] = [
  ['an absolute name', 'add("/tmp/longhaul-escaped")', 'refused'],
  ['a name with ..', 'add("a/../../../tmp/longhaul-escaped")', 'refused'],
  ['a name that is ..', 'add("..", type=tarfile.DIRTYPE)', 'refused'],
  ['a device', 'add("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3); add("ok")', /^ok\n$/],
  ['a block device', 'add("sda", type=tarfile.BLKTYPE, devmajor=8); add("ok")', /^ok\n$/],
  ['a hard link out', 'add("shadow", type=tarfile.LNKTYPE, linkname="/etc/shadow")', 'refused'],
  ['a hard link out by ..', 'add("h", type=tarfile.LNKTYPE, linkname="../etc/hosts")', 'refused'],
  ['a hard link to nothing', 'add("h", type=tarfile.LNKTYPE, linkname="none")', 'refused'],
  [
    'a file through a link that points out',
    'add("l", type=tarfile.SYMTYPE, linkname="/tmp"); add("l/longhaul-escaped")',
    'refused',
  ],
  [
    'a file in place of a link that points out',
    'add("l", type=tarfile.SYMTYPE, linkname="/tmp/longhaul-escaped"); add("l")',
    /^l\n$/,
  ],
  [
    'a hard link through a link',
    'add("l", type=tarfile.SYMTYPE, linkname="/etc"); add("h", type=tarfile.LNKTYPE, linkname="l/hosts")',
    'refused',
  ],
  ['a set-user-id program', 'add("s", mode=0o6755)', /^s\n$/],
  ['an owner', 'add("o", uid=0, gid=0, uname="root")', /^o\n$/],
  ['entries twice', 'add("twice", b"1"); add("twice", b"2")', /^twice\n$/],
  [
    'a folder in place of a file and back',
    'add("x"); add("x", type=tarfile.DIRTYPE, mode=0o755); add("x/y"); add("x")',
    /^x\n$/,
  ],
  ['a whiteout', 'add("kept"); add(".wh.kept")', /^kept\n$/],
  ['a name with a newline', 'add("new\\nline")', /^new\nline\n$/],
  ['a name that is not UTF-8', 'add(b"bad\\xff".decode("utf-8", "surrogateescape"))', /^bad.+\n$/],
  ['a name of 255 bytes', 'add("n" * 255)', /^n{255}\n$/],
  ['a name of 256 bytes', 'add("n" * 256)', 'refused'],
  ['a path of 5,000 bytes', 'add("/".join(["d" * 100] * 50))', 'refused'],
  ['a name with NUL', 'tar.pax_headers = {}; add("a", pax_headers={"path": "a\\0b"})', 'refused'],
  ['a file larger than the disk', 'add("big", bytes(40 << 20))', 'refused'],
  [
    'a declared size beyond the archive',
    'm = tarfile.TarInfo("huge"); m.size = 1 << 50; out.write(m.tobuf(tarfile.GNU_FORMAT))',
    'refused',
  ],
  ['more entries than inodes', 'for i in range(3000): add("f%d" % i, b"")', 'refused'],
  [
    'a mode that locks its owner out',
    'add("d", type=tarfile.DIRTYPE, mode=0); add("d/f")',
    /^d\n$/,
  ],
  ['times beyond reason', 'add("t", mtime=1 << 60)', /^t\n$/],
  ['nothing', '', /^$/],
];

describe.skipIf(!probe.ok)(`layer archives${skipped}`, () => {
  let driver: BubblewrapDriver;
  const dir = join(home, 'driver');
  const layers = () => readdirSync(join(dir, 'layers'));
  beforeAll(async () => {
    driver = await BubblewrapDriver.open({ dir, warm: 0 });
  });
  afterAll(() => driver?.close());
  const watched = () => ['/etc/shadow', '/etc/hosts', '/dev/null'].map((p) => statSync(p).ctimeMs);

  test('what is exported from one folder and imported into another is equal', async () => {
    const sandbox = await driver.create();
    await sandbox.runCode([
      {
        language: 'python',
        source: `
import os
os.makedirs("d/e"); open("d/a", "w").write("one"); os.link("d/a", "d/e/same"); os.symlink("/etc/passwd", "out")
open("hole", "wb").truncate(3 << 20); os.mkfifo("p"); open("d/x", "w").write("gone")
open(b"bad\\xff\\n", "w").write("odd"); open("n" * 255, "w"); os.mkdir("empty"); os.chmod("empty", 0o700)
open("locked", "w").write("k"); os.chmod("locked", 0o400)
for n in range(300): open("d/e/%d" % n, "w").write(str(n))`,
      },
    ]);
    await sandbox.snapshot({ durable: true });
    await sh(sandbox, 'rm d/x; mv d/e moved; echo two >> d/a');
    const layer = await sandbox.snapshot({ durable: true });
    const look =
      'find . -printf "%p %y %m %s %l %Ts\\n" | LC_ALL=C sort; find . -type f -exec sha256sum {} + | LC_ALL=C sort';
    const before = await sh(sandbox, look);
    expect(before).toContain('moved/299');
    const packed = await bytesOf(await driver.exportLayer(layer));
    const other = await BubblewrapDriver.open({ dir: join(home, 'other'), warm: 0 });
    const imported = await other.importLayer(Readable.from([packed]));
    const there = await other.create({}, imported);
    const strip = (text: string) => text.replace(/^\. d .*\n/m, '');
    expect(strip(await sh(there, look))).toBe(strip(before));
    // Packed again it is the same tree.
    expect(zstdDecompressSync(await bytesOf(await other.exportLayer(imported))).length).toBe(
      zstdDecompressSync(packed).length,
    );
    await other.close();
    await sandbox.stop();
  });

  test.each(HOSTILE)('%s', async (_, source, expected) => {
    const before = watched();
    const had = layers();
    const spec = { diskBytes: 16 << 20, inodes: 2000 };
    const importing = driver.importLayer(Readable.from([archive(source)]), spec);
    if (expected === 'refused') {
      await expect(importing).rejects.toMatchObject({ code: 'FileRefused', class: 'usage' });
      expect(layers()).toEqual(had);
    } else {
      const layer = await importing;
      const sandbox = await driver.create(spec, layer);
      expect(await sh(sandbox, 'ls')).toMatch(expected);
      const kinds = await sh(sandbox, 'find . -mindepth 1 -printf "%y %m %u %l\\n"');
      expect(kinds).not.toMatch(/^[bc]|^. [2467]\d{3}|^l .* \/tmp/m);
      const files = readdirSync(join(dir, 'layers', layer, 'fs'), { withFileTypes: true });
      expect(files.filter((file) => file.isCharacterDevice() || file.isBlockDevice())).toEqual([]);
      await sandbox.stop();
    }
    expect(watched()).toEqual(before);
    expect(readdirSync('/tmp').filter((name) => name.includes('longhaul-escaped'))).toEqual([]);
  });

  test('an archive that is cut, changed or something else is refused, and never half a layer', async () => {
    const sandbox = await driver.create();
    await sh(sandbox, 'head -c 300000 /dev/urandom > a; for i in 1 2 3; do echo $i > f$i; done');
    const layer = await sandbox.snapshot({ durable: true });
    await sandbox.stop();
    const whole = await bytesOf(await driver.exportLayer(layer));
    const had = layers();
    const refused = async (bytes: Uint8Array) => {
      await expect(driver.importLayer(Readable.from([bytes]))).rejects.toMatchObject({
        code: 'FileRefused',
      });
      expect(layers()).toEqual(had);
    };
    for (const part of [0, 1, 20, whole.length >> 1, whole.length - 1])
      await refused(whole.subarray(0, part));
    const tar = zstdDecompressSync(whole);
    // Cut inside a file, and between two members.
    for (const part of [100_000, tar.length - 10_240, 512])
      await refused(zstdCompressSync(tar.subarray(0, part)));
    await refused(tar);
    await refused(zstdCompressSync(Buffer.from('no tar, though it has bytes'.repeat(100))));
    await refused(Buffer.from('no zstd'));
    await refused(zstdCompressSync(readFileSync('/bin/true')));
    const broken = new Readable({
      read() {
        this.push(whole.subarray(0, 1000));
        this.destroy(new Error('the line went down'));
      },
    });
    await expect(driver.importLayer(broken)).rejects.toMatchObject({ code: 'FileRefused' });
    expect(layers()).toEqual(had);
  });

  test('bits flipped anywhere are refused, or seen for what they are', async () => {
    const sandbox = await driver.create();
    await sh(sandbox, 'mkdir d; for i in $(seq 40); do seq $i > d/$i; done');
    const layer = await sandbox.snapshot({ durable: true });
    const look = 'cat d/* | sha256sum; ls -R | sha256sum';
    const right = await sh(sandbox, look);
    const whole = await bytesOf(await driver.exportLayer(layer));
    const outcomes = { refused: 0, equal: 0, changed: 0 };
    for (let i = 0; i < 12; i++) {
      const bytes = Buffer.from(whole);
      const at = Math.floor(((i + 0.5) * whole.length) / 12);
      bytes[at]! ^= 1 << (i % 8);
      const got = await driver.importLayer(Readable.from([bytes])).catch((error) => error);
      if (typeof got !== 'string') {
        expect(got).toMatchObject({ code: 'FileRefused' });
        outcomes.refused++;
        continue;
      }
      const there = await driver.create({}, got);
      outcomes[(await sh(there, look)) === right ? 'equal' : 'changed']++;
      await there.stop();
    }
    // The archive carries a checksum: what was changed does not become a layer.
    expect(outcomes).toMatchObject({ changed: 0 });
    await sandbox.stop();
  });
});
