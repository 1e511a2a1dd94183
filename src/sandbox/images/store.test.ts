import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { BubblewrapDriver, probeBubblewrap } from '../index.ts';
import { ImageStore } from './index.ts';
import { asFolder, asTar, dockerSave, type Member, ociLayout, sha, tar } from './test-archives.ts';

const BUSYBOX = '/bin/busybox';
const home = mkdtempSync(join(tmpdir(), 'longhaul-images-'));
const probe = await probeBubblewrap({ dir: join(home, 'probe') });
const lacking = !probe.ok
  ? probe.reason
  : existsSync(BUSYBOX)
    ? null
    : `${BUSYBOX} (package busybox-static) is missing`;
const MIB = 1024 * 1024;

let driver: BubblewrapDriver;
let store: ImageStore;
let count = 0;

beforeAll(async () => {
  if (lacking) return;
  driver = await BubblewrapDriver.open({ dir: join(home, 'driver'), warm: 0 });
  store = new ImageStore({ driver, spec: { diskBytes: 64 * MIB, memoryBytes: 128 * MIB } });
});
afterEach(async () => {
  if (!lacking) for (const image of await store.list()) await store.remove(image.digest);
});
afterAll(async () => {
  if (!lacking) await driver.close();
  rmSync(home, { recursive: true, force: true });
});

const fresh = (name: string) => join(home, `${++count}-${name}`);

function written(name: string, bytes: Buffer): string {
  const path = fresh(name);
  writeFileSync(path, bytes);
  return path;
}

/** Layers that can be found; what is on its way out is renamed first. */
const savedLayers = () =>
  readdirSync(join(driver.dir, 'layers')).filter((name) => name.startsWith('d-')).length;

/** A root file system of one program, with all that layers of images are made of. */
function busyboxLayers(more: Member[] = []): Buffer[] {
  const links = ['sh', 'ls', 'cat', 'id', 'stat', 'env', 'touch', 'rm', 'mkdir', 'pwd', 'head'];
  return [
    tar([
      { name: './', type: '5', mode: 0o755 },
      { name: 'usr/bin/', type: '5', mode: 0o755 },
      { name: 'usr/bin/busybox', mode: 0o755, content: readFileSync(BUSYBOX) },
      // As merged /usr has it, but absolute: it must lead to the image's own /usr.
      { name: 'bin', type: '2', link: '/usr/bin' },
      ...links.map((name) => ({ name: `bin/${name}`, type: '2', link: 'busybox' })),
      { name: 'etc/', type: '5', mode: 0o755 },
      { name: 'etc/passwd', content: 'root:x:0:0::/root:/bin/sh\nweb:x:33:33::/:/bin/sh' },
      { name: 'etc/shadow', mode: 0o600, content: 'root:!::\n' },
      { name: 'data/', type: '5', mode: 0o755 },
      { name: 'data/old', content: 'old' },
      { name: 'data/stays', content: 'stays' },
      { name: 'data/hidden/', type: '5', mode: 0o755 },
      { name: 'data/hidden/a', content: 'a' },
      { name: 'usr/bin/setuid', mode: 0o4755, content: 'x' },
      { name: 'dev/null', type: '3', mode: 0o666 },
      { name: 'data/device', type: '3', mode: 0o666 },
    ]),
    tar([
      { name: 'data/.wh.old', content: '' },
      { name: 'data/hidden/.wh..wh..opq', content: '' },
      { name: 'data/hidden/b', content: 'b' },
      { name: 'data/twin', type: '1', link: 'data/stays' },
      { name: 'bin/extra', mode: 0o755, content: '#!/bin/sh\necho extra\n' },
    ]),
    tar([{ name: 'data/last', content: 'last' }, ...more]),
  ];
}

const CONFIG = {
  Env: ['PATH=/bin', 'GREETING=hello $HOME "x"'],
  WorkingDir: '/srv/app',
  User: 'web',
  Entrypoint: ['/bin/sh'],
  Labels: { a: 'b' },
};

async function run(image: string, script: string): Promise<string> {
  const sandbox = await driver.create({ image });
  try {
    const result = await sandbox.exec({ argv: ['sh', '-c', script] });
    return result.stdout + result.stderr;
  } finally {
    await sandbox.stop();
  }
}

describe.skipIf(lacking !== null)(
  `image archives${lacking ? ` (skipped: ${lacking})` : ''}`,
  () => {
    const archives: [string, () => string][] = [
      ['an OCI layout', () => asFolder(ociLayout(image()), fresh('layout'))],
      ['an OCI layout in a tar', () => written('oci.tar', asTar(ociLayout(image())))],
      ['docker save', () => written('docker.tar', asTar(dockerSave(image())))],
    ];
    const image = () => ({ layers: busyboxLayers(), config: CONFIG });

    test.each(archives)('%s becomes the root of sandboxes', async (_, archive) => {
      const added = await store.add(archive(), { name: 'mine' });
      expect(added.config).toMatchObject({ workdir: '/srv/app', user: 'web', labels: { a: 'b' } });
      expect(added.platform).toMatch(/^linux\//);
      expect((await store.get('test:1')).digest).toBe(added.digest);
      expect((await store.get('mine')).digest).toBe(added.digest);
      const said = await run(
        `image:${added.digest}`,
        'pwd; echo "$GREETING"; id -u; extra; cd /data; ls; cat twin; stat -c %h twin; ls hidden; stat -c %a /usr/bin/setuid; cat /etc/passwd; cat /etc/hosts | head -n 1; touch /data/x',
      );
      expect(said.split('\n')).toEqual([
        '/srv/app',
        'hello $HOME "x"',
        '1000',
        'extra',
        'hidden',
        'last',
        'stays',
        'twin',
        'stays2',
        'b',
        '755',
        'root:x:0:0::/root:/bin/sh',
        'web:x:33:33::/:/bin/sh',
        'agent:x:1000:1000:agent:/workspace:/bin/sh',
        '127.0.0.1 localhost',
        'touch: /data/x: Read-only file system',
        '',
      ]);
    });

    test('one image of three archives is kept once', async () => {
      const digests = new Set<string>();
      for (const [, archive] of archives) digests.add((await store.add(archive())).digest);
      expect(digests.size).toBe(1);
      expect((await store.list()).map((each) => each.names)).toEqual([['test:1']]);
    });

    test('a workspace, a fork and a snapshot lie over an image, and its root stays as it is', async () => {
      const { digest } = await store.add(archives[2]![1]());
      const sandbox = await driver.create({ image: `image:${digest}` });
      await sandbox.writeFile('/workspace/note', 'one');
      const layer = await sandbox.snapshot();
      await sandbox.writeFile('/workspace/note', 'two');
      const [child] = await sandbox.fork(1);
      await sandbox.rollback(layer);
      const note = (each: typeof sandbox) =>
        each
          .exec({ argv: ['cat', '/workspace/note', '/data/last'] })
          .then((result) => result.stdout);
      expect(await note(sandbox)).toBe('onelast');
      expect(await note(child!)).toBe('twolast');
      expect((await sandbox.stat('/tests')).target).toBe('tmp/tests');
      await sandbox.exec({ argv: ['mkdir', '-p', '/tmp/tests'] });
      await sandbox.writeFile('/tests/a', 'a');
      await sandbox.putSecrets({ KEY: 'v' });
      expect(Buffer.from(await sandbox.readFile('/run/secrets/KEY')).toString()).toBe('v');
      await Promise.all([sandbox.stop(), child!.stop()]);
    });

    test('rootfs: the whole root is the workspace: written, frozen, rolled back, forked', async () => {
      const { digest } = await store.add(archives[2]![1]());
      const sandbox = await driver.create({ image: `rootfs:${digest}` });
      const say = async (each: typeof sandbox, script: string) => {
        const { stdout, stderr } = await each.exec({ argv: ['sh', '-c', script] });
        return stdout + stderr;
      };
      expect(await say(sandbox, 'echo new > /data/new; rm -rf /data/hidden; ls /data')).toBe(
        'last\nnew\nstays\ntwin\n',
      );
      const layer = await sandbox.snapshot({ durable: true });
      expect(await say(sandbox, 'rm /data/new; echo x > /etc/x; ls /data')).toBe(
        'last\nstays\ntwin\n',
      );
      const [child] = await sandbox.fork(1);
      expect(await say(child!, 'cat /etc/x; ls /data')).toBe('x\nlast\nstays\ntwin\n');
      await sandbox.rollback(layer);
      expect(await say(sandbox, 'ls /data /etc/x')).toContain('new\n');
      expect(await say(sandbox, 'ls /etc/x')).toContain('No such file');
      await Promise.all([sandbox.stop(), child!.stop()]);
      const again = await driver.create({ image: `rootfs:${digest}` }, layer);
      expect(await say(again, 'cat /data/new')).toBe('new\n');
      await again.stop();
      await driver.dropLayer(layer);
    });

    test('rootfs: a memory bomb, and an agent that is lost with its process 1, leave the files', async () => {
      const { digest } = await store.add(archives[2]![1]());
      const sandbox = await driver.create({
        image: `rootfs:${digest}`,
        memoryBytes: 64 * MIB,
        diskBytes: 16 * MIB,
      });
      await sandbox.writeFile('/data/kept', 'kept');
      const inner = sandbox as unknown as {
        endAgent(): void;
        replaceAgent(late: boolean, error: Error): Promise<string>;
      };
      inner.endAgent();
      expect(await inner.replaceAgent(true, new Error('silent'))).toBe('timeout');
      const bomb = await sandbox.exec({
        argv: ['busybox', 'sort', '/dev/zero'],
        timeoutMs: 20_000,
      });
      if (driver.capabilities.memory === 'cgroup') expect(bomb.cause).toBe('out_of_memory');
      else expect(bomb.code).not.toBe(0);
      const read = await sandbox.exec({ argv: ['cat', '/data/kept', '/data/last'] });
      expect(read.stdout).toBe('keptlast');
      await sandbox.stop();
    });

    test('snippets want a Python of the image', async () => {
      const { digest } = await store.add(archives[2]![1]());
      const sandbox = await driver.create({ image: `image:${digest}` });
      await expect(
        sandbox.runCode([{ language: 'python', source: 'print(1)' }]),
      ).rejects.toMatchObject({
        code: 'CapabilityMissing',
        message: expect.stringMatching(/python3: command not found/),
      });
      await sandbox.stop();
    });

    test('the agent loads no module of an image', async () => {
      const version = /python3\.\d+/.exec(
        (await run('host', 'ls /usr/lib /usr/local/lib')).replaceAll('\n', ' '),
      )![0];
      const poison = 'open("/tmp/poisoned", "w").write(__name__)\n';
      const modules = [
        'bz2',
        'lzma',
        'gzip',
        'idna',
        'stringprep',
        'random',
        'subprocess',
        'grp',
        'pwd',
      ];
      const layers = busyboxLayers([
        ...modules.map((name) => ({ name: `usr/lib/${version}/${name}.py`, content: poison })),
        { name: `usr/lib/${version}/encodings/idna.py`, content: poison },
      ]);
      const { digest } = await store.add(
        written('p.tar', asTar(dockerSave({ layers, config: CONFIG }))),
      );
      const sandbox = await driver.create({ image: `image:${digest}` });
      await sandbox.writeFile('/workspace/a/b', 'x');
      await sandbox.listFiles('/');
      await sandbox.exec({ argv: ['nothing'] });
      await sandbox.snapshot({ durable: true });
      expect((await sandbox.listFiles('/tmp')).map((entry) => entry.name)).toEqual([]);
      await sandbox.stop();
    });

    const hostileRoots: [string, Member[], RegExp][] = [
      [
        'mount points that are links',
        [
          { name: '.wh.dev', content: '' },
          { name: '.wh.etc', content: '' },
          ...['proc', 'dev', 'tmp', 'etc', 'run', 'workspace'].map((name) => ({
            name,
            type: '2',
            link: '../../../../tmp/owner',
          })),
        ],
        /^root:x:0.*agent:x:1000.*\nworkspace\n$/s,
      ],
      [
        'mount points that are files',
        ['proc', 'tmp', 'run', 'workspace', 'tests'].map((name) => ({ name, content: 'x' })),
        /agent:x:1000/,
      ],
      [
        'accounts that are a link to the host',
        [
          { name: 'etc/.wh.passwd', content: '' },
          { name: 'etc/passwd', type: '2', link: '/../../../../../etc/machine-id' },
        ],
        /^root:x:0:0:root.*agent:x:1000/s,
      ],
      [
        'accounts that are a pipe',
        [
          { name: 'etc/.wh.passwd', content: '' },
          { name: 'etc/passwd', type: '6' },
        ],
        /agent:x:1000/,
      ],
    ];
    test.each(hostileRoots)('a root with %s still makes a sandbox', async (_, more, expected) => {
      const layers = busyboxLayers(more);
      const { digest } = await store.add(
        written('h.tar', asTar(dockerSave({ layers, config: CONFIG }))),
      );
      for (const kind of ['image', 'rootfs']) {
        const sandbox = await driver.create({ image: `${kind}:${digest}` });
        const script =
          'cat /etc/passwd; cd /workspace && echo workspace; touch /tmp/a /workspace/b';
        const result = await sandbox.exec({ argv: ['sh', '-c', script], cwd: '/' });
        expect(result.stdout).toMatch(expected);
        expect(result.stderr).toBe('');
        await sandbox.stop();
      }
    });

    const layerOf = (members: Member[]) =>
      asTar(dockerSave({ layers: [tar(members)], config: CONFIG }));
    const oci = (change: (files: Map<string, Buffer>) => void) => {
      const files = ociLayout(image());
      change(files);
      return asTar(files);
    };
    const edited =
      (path: string, change: (text: string) => string) => (files: Map<string, Buffer>) =>
        void files.set(path, Buffer.from(change(files.get(path)!.toString())));

    const refusals: [string, () => Buffer, RegExp][] = [
      ['text', () => Buffer.from('hello'), /no tar/],
      ['nothing', () => Buffer.alloc(0), /no tar/],
      ['a compressed archive', () => gzipSync(asTar(ociLayout(image()))), /gunzip/],
      [
        'an archive cut short',
        () => asTar(ociLayout(image())).subarray(0, 200_000),
        /cut short|damaged/,
      ],
      ['an archive of something else', () => asTar(new Map([['x', Buffer.from('x')]])), /neither/],
      ['a broken index', () => oci((files) => files.set('index.json', Buffer.from('{'))), /JSON/],
      [
        'a digest that is a path',
        () =>
          oci(
            edited('index.json', (text) =>
              text.replace(/sha256:\w{64}/, 'sha256:../../etc/passwd'),
            ),
          ),
        /expected sha256/,
      ],
      [
        'an index of another size',
        () => oci(edited('index.json', (text) => text.replace(/"size":\d+/, '"size":7'))),
        /size or checksum/,
      ],
      [
        'another layer than the manifest names',
        () =>
          oci((files) => {
            const [path] = [...files].find(([, bytes]) => bytes[0] === 0x1f)!;
            files.set(path, gzipSync(tar([{ name: 'evil', content: 'x' }])));
          }),
        /size or checksum/,
      ],
      [
        'a layer with bytes after it',
        () =>
          oci((files) => {
            const [path, bytes] = [...files].find(([, each]) => each[0] === 0x28)!;
            files.set(path, Buffer.concat([bytes, Buffer.alloc(8)]));
          }),
        /size or checksum|decompress/,
      ],
      [
        'an archive without its layer',
        () =>
          oci((files) => {
            const [path] = [...files].find(([, bytes]) => bytes[0] === 0x1f)!;
            files.delete(path);
          }),
        /no such file/,
      ],
      [
        'a docker archive with another layer',
        () => {
          const files = dockerSave(image());
          const path = [...files.keys()].find((each) => each.endsWith('layer.tar'))!;
          files.set(path, tar([{ name: 'evil', content: 'x' }]));
          return asTar(files);
        },
        /size or checksum/,
      ],
      [
        'a docker archive with another configuration',
        () => {
          const files = dockerSave(image());
          const path = [...files.keys()].find((each) => /^\w{64}\.json$/.test(each))!;
          files.set(path, Buffer.from(files.get(path)!.toString().replace('/srv/app', '/srv/apq')));
          return asTar(files);
        },
        /checksum/,
      ],
      [
        'another architecture',
        () => asTar(dockerSave({ ...image(), architecture: 's390x' })),
        /s390x/,
      ],
      ['a member above the root', () => layerOf([{ name: '../../evil', content: 'x' }]), /leaves/],
      ['an absolute member', () => layerOf([{ name: '/evil', content: 'x' }]), /leaves/],
      [
        'a hard link to the host',
        () => layerOf([{ name: 'x', type: '1', link: '../../etc/passwd' }]),
        /leaves/,
      ],
      [
        'a hard link to no member',
        () => layerOf([{ name: 'x', type: '1', link: 'etc/passwd' }]),
        /no earlier member/,
      ],
      [
        'a chain of links without an end',
        () =>
          layerOf([
            { name: 'a', type: '2', link: 'b' },
            { name: 'b', type: '2', link: 'a' },
            { name: 'a/x', content: 'x' },
          ]),
        /too many links/,
      ],
      [
        'a layer that is no tar',
        () => asTar(dockerSave({ layers: [Buffer.alloc(4096, 'x')] })),
        /tar/,
      ],
      [
        'a layer larger than the disk',
        () => layerOf([{ name: 'big', content: Buffer.alloc(80 * MIB) }]),
        /No space/,
      ],
      [
        'a layer that unpacks to far more than it is',
        () => {
          const zeros = Buffer.alloc(300 * MIB);
          const files = ociLayout({ layers: [zeros] });
          return asTar(files);
        },
        /more than|tar|size/,
      ],
      [
        'a variable with a NUL',
        () => asTar(dockerSave({ layers: [], config: { Env: ['A=b\0c'] } })),
        /no environment variable/,
      ],
    ];
    test.each(refusals)('%s is refused and leaves nothing', async (name, bytes, message) => {
      const layers = savedLayers();
      await expect(store.add(written(`${name.length}.tar`, bytes()))).rejects.toMatchObject({
        code: 'FileRefused',
        message: expect.stringMatching(message),
      });
      expect(await store.list()).toEqual([]);
      expect(savedLayers()).toBe(layers);
    });

    test('a member written through a link stays below the root', async () => {
      const layers = busyboxLayers([
        { name: 'out', type: '2', link: '/../../../../etc' },
        { name: 'out/inside', content: 'inside' },
      ]);
      const { digest } = await store.add(
        written('l.tar', asTar(dockerSave({ layers, config: CONFIG }))),
      );
      expect(await run(`image:${digest}`, 'cat /etc/inside')).toBe('inside');
      expect(existsSync('/etc/inside')).toBe(false);
    });

    test('an archive with several images wants to be told which', async () => {
      const files = new Map([...dockerSave(image()), ...ociLayout({ layers: [] })]);
      files.delete('index.json');
      const [entry] = JSON.parse(files.get('manifest.json')!.toString());
      files.set(
        'manifest.json',
        Buffer.from(JSON.stringify([entry, { ...entry, RepoTags: ['b:2'] }])),
      );
      const path = written('two.tar', asTar(files));
      await expect(store.add(path)).rejects.toThrow(/2 images; it has test:1, b:2/);
      await store.add(path, { reference: 'b:2' });
      expect((await store.list())[0]!.names).toEqual(['b:2']);
    });

    test('what cannot be opened is refused with its name', async () => {
      const folder = fresh('loop');
      symlinkSync(folder, folder);
      await expect(store.add(folder)).rejects.toMatchObject({ code: 'NotFound' });
      const layout = asFolder(ociLayout(image()), fresh('links'));
      rmSync(join(layout, 'index.json'));
      symlinkSync('/etc/passwd', join(layout, 'index.json'));
      // Not followed, so this is a folder of files, and not an archive.
      const { digest } = await store.add(layout);
      expect((await store.get(digest)).source).toBe(layout);
      if (process.getuid?.() === 0) return;
      const path = written('closed.tar', asTar(ociLayout(image())));
      chmodSync(path, 0);
      await expect(store.add(path)).rejects.toMatchObject({ code: 'FileRefused' });
    });

    test('an abort ends an import and leaves nothing', async () => {
      const layers = savedLayers();
      const path = written('abort.tar', asTar(dockerSave(image())));
      await expect(store.add(path, { signal: AbortSignal.abort() })).rejects.toMatchObject({
        code: 'Interrupted',
      });
      expect(await store.list()).toEqual([]);
      expect(savedLayers()).toBe(layers);
    });

    test('a directory is taken in, or bound as it is', async () => {
      const root = fresh('root');
      mkdirSync(join(root, 'bin'), { recursive: true });
      writeFileSync(join(root, 'bin/sh'), readFileSync(BUSYBOX), { mode: 0o755 });
      writeFileSync(join(root, 'secret'), 'secret', { mode: 0o600 });
      for (const path of [root, join(root, 'bin'), join(root, 'bin/sh')]) chmodSync(path, 0o755);
      const { digest } = await store.add(root, { name: 'tree' });
      expect(await run(`image:${digest}`, 'cd /; echo *')).toBe(
        'bin dev etc logs proc run secret solution tests tmp workspace\n',
      );
      expect(await run(`dir:${root}`, 'cd /; echo *; : > /x')).toMatch(/^bin dev .*Read-only/s);
      // Nothing is handed out that the sandbox's own uid may not read.
      if (driver.capabilities.ownUid)
        expect(await run(`dir:${root}`, 'read a < /secret; echo "[$a]"')).toContain(
          'Permission denied',
        );
      await expect(driver.create({ image: `dir:${root}/none` })).rejects.toMatchObject({
        code: 'NotFound',
      });
      await expect(driver.create({ image: `dir:${root}/secret` })).rejects.toMatchObject({
        code: 'NotFound',
      });
      if (!driver.capabilities.ownUid) return;
      chmodSync(root, 0o700);
      await expect(driver.create({ image: `dir:${root}` })).rejects.toMatchObject({
        code: 'ConfigInvalid',
        message: expect.stringMatching(/uid cannot read/),
      });
    });

    test('a directory with Python runs snippets by it', async ({ skip }) => {
      if (!driver.capabilities.ownUid) skip('only root can bind / as a root');
      const sandbox = await driver.create({ image: 'dir:/' });
      const source = 'import sys, os; print(sys.argv, sys.executable, os.getpid() > 1)';
      const [first, second] = await sandbox.runCode([
        { language: 'python', source },
        { language: 'python', source: 'print(input())\nraise SystemExit(3)', stdin: 'fed\n' },
      ]);
      expect(first!.stdout).toMatch(/python3\S* True/);
      expect(second).toMatchObject({ code: 3, stdout: 'fed\n' });
      const shadow = await sandbox.exec({ argv: ['cat', '/etc/shadow'] });
      expect(shadow.code).toBe(1);
      await sandbox.stop();
    });

    test('prune keeps what images stand on, and remove gives it back', async () => {
      const { digest, layer } = await store.add(archives[2]![1](), { name: 'kept' });
      utimesSync(join(driver.dir, 'layers', layer!), 0, 0);
      const report = await driver.prune(async () => new Set());
      expect(report.removed).not.toContain(layer);
      expect(await run(`image:${digest}`, 'cat /data/last')).toBe('last');
      await store.remove('kept');
      expect((await driver.prune(async () => new Set())).removed).toContain(layer);
      expect(await driver.hasLayer(layer!)).toBe(false);
      await expect(store.get('kept')).rejects.toMatchObject({ code: 'NotFound' });
      await expect(driver.create({ image: `image:${digest}` })).rejects.toMatchObject({
        code: 'NotFound',
      });
      await store.remove(digest);
    });

    test.each(['', '../x', 'A', 'a b', 'x'.repeat(300), 'a:', 'image/../../b', 'a\0b'])(
      '%j is no name',
      async (name) => {
        await expect(store.add('host', { name })).rejects.toMatchObject({ code: 'ConfigInvalid' });
      },
    );

    test.each([
      '',
      'hosts',
      'image:',
      `image:${'A'.repeat(64)}`,
      'image:../x',
      `rootfs:${sha('x')}`,
      'ftp:x',
    ])('a sandbox of image %j is refused', async (image) => {
      await expect(driver.create({ image })).rejects.toMatchObject({
        code: expect.stringMatching(/^(NotFound|ConfigInvalid)$/),
      });
    });
  },
);
