import { spawn } from 'node:child_process';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { BubblewrapDriver, probeBubblewrap } from '../../index.ts';
import { type BuildOptions, ImageStore } from '../index.ts';
import { BuildContext } from './context.ts';

const BUSYBOX = '/bin/busybox';
const home = mkdtempSync(join(tmpdir(), 'longhaul-build-'));
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

/** A base image with a shell, from nothing but one program of the host. */
const BASE = `FROM scratch
COPY --from=host ${BUSYBOX} /bin/
RUN ["/bin/busybox", "--install", "-s", "/bin"]
ENV PATH=/bin
`;

beforeAll(async () => {
  if (lacking) return;
  driver = await BubblewrapDriver.open({ dir: join(home, 'driver'), warm: 0 });
  store = new ImageStore({ driver, spec: { diskBytes: 64 * MIB, memoryBytes: 256 * MIB } });
  await store.build({ context: context({ Dockerfile: BASE }), name: 'base' });
}, 60_000);
afterAll(async () => {
  if (!lacking) await driver.close();
  rmSync(home, { recursive: true, force: true });
});

function context(files: Record<string, string>): string {
  const root = join(home, `context-${++count}`);
  mkdirSync(root);
  for (const [name, content] of Object.entries(files)) {
    mkdirSync(dirname(join(root, name)), { recursive: true });
    writeFileSync(join(root, name), content);
  }
  return root;
}

const build = (
  Dockerfile: string,
  files: Record<string, string> = {},
  options: Partial<BuildOptions> = {},
) => store.build({ context: context({ ...files, Dockerfile }), ...options });

async function run(image: string, script: string): Promise<string> {
  const sandbox = await driver.create({ image });
  try {
    const result = await sandbox.exec({ argv: ['sh', '-c', script] });
    return result.stdout + result.stderr;
  } finally {
    await sandbox.stop();
  }
}

const FILES = {
  'a.txt': 'A',
  'src/b.txt': 'B',
  'src/deep/c.md': 'C',
  '.hidden': 'h',
  'x y': 'blank',
};

describe.skipIf(lacking !== null)(`image builds${lacking ? ` (skipped: ${lacking})` : ''}`, () => {
  test('COPY follows Docker: folders give their content, patterns choose, targets make folders', async () => {
    const { image } = await build(
      [
        'FROM base',
        'WORKDIR /w',
        'COPY a.txt one',
        'COPY a.txt into/',
        'COPY src tree',
        'COPY src/*.txt a.txt many/',
        'COPY . /all/',
        'RUN mkdir there && ln -s there link',
        'COPY a.txt there',
        'COPY a.txt link/linked',
        'COPY ["x y", "named with blanks"]',
        'COPY --chmod=700 src /private',
        'ADD a.txt .',
        'COPY src/deep/ .',
      ].join('\n'),
      { ...FILES, '.dockerignore': 'src/deep\n!src/deep/c.md\nDockerfile\n' },
    );
    expect(
      (
        await run(`image:${image.digest}`, 'find /w /all -type f | sort; stat -c %a /private/b.txt')
      ).split('\n'),
    ).toEqual([
      '/all/.dockerignore',
      '/all/.hidden',
      '/all/a.txt',
      '/all/src/b.txt',
      '/all/src/deep/c.md',
      '/all/x y',
      '/w/a.txt',
      '/w/c.md',
      '/w/into/a.txt',
      '/w/many/a.txt',
      '/w/many/b.txt',
      '/w/named with blanks',
      '/w/one',
      '/w/there/a.txt',
      '/w/there/linked',
      '/w/tree/b.txt',
      '/w/tree/deep/c.md',
      '700',
      '',
    ]);
  });

  test('ARG, ENV, USER, CMD and stages', async () => {
    const { image, notes } = await build(
      [
        'ARG FROM_NAME=base',
        'ARG SHARED=shared',
        'FROM $FROM_NAME AS maker',
        'ARG SHARED',
        'ARG VERSION=1',
        // biome-ignore lint/suspicious/noTemplateCurlyInString: the Dockerfile's own
        'ENV VERSION_SEEN=${VERSION:-none} NAME="two words"',
        'RUN echo "$SHARED/$VERSION/$NAME" > /out',
        'FROM base AS unused',
        'RUN exit 9',
        'FROM base',
        'ARG VERSION=kept',
        'COPY --from=maker /out /made/out',
        'COPY --from=0 /bin/busybox /tool',
      ]
        .concat(
          'LABEL a=b "c d"=e',
          'USER 1',
          'EXPOSE 80 443',
          'ENTRYPOINT ["x"]',
          'CMD run it',
          'MAINTAINER me',
        )
        .join('\n'),
      {},
      { buildArgs: { VERSION: '$(touch /pwned); `id` "', OTHER: 'x' } },
    );
    expect(await run(`image:${image.digest}`, 'cat /made/out; ls /pwned /tool')).toBe(
      'shared/$(touch /pwned); `id` "/two words\n/tool\nls: /pwned: No such file or directory\n',
    );
    expect(image.config).toMatchObject({
      env: { PATH: '/bin' },
      user: '1',
      labels: { a: 'b', 'c d': 'e' },
      exposed: ['80', '443'],
      entrypoint: ['x'],
      cmd: ['/bin/sh', '-c', 'run it'],
    });
    expect(notes.join('\n')).toMatch(/USER.*\n.*MAINTAINER.*\n.*OTHER/s);
  });

  test('heredocs of RUN and COPY', async () => {
    const { image } = await build(
      'FROM base\nENV N=5\nRUN <<EOF\nset -e\necho "$N" > /n\nfalse || echo two >> /n\nEOF\nRUN cat > /c <<\'E\'\n$N\nE\nCOPY <<A <<"B" /d/\nvalue $N\nA\nvalue $N\nB\n',
    );
    expect(await run(`image:${image.digest}`, 'cat /n /c /d/A /d/B')).toBe(
      '5\ntwo\n$N\nvalue 5\nvalue $N\n',
    );
  });

  test('steps are kept by content: what changed is done again, and all after it', async () => {
    const root = context({
      ...FILES,
      Dockerfile:
        'FROM base\nCOPY a.txt /a\nRUN cat /a > /b\nCOPY src /src\nRUN echo "$RANDOM" > /r',
    });
    const steps = async (options: Partial<BuildOptions> = {}) =>
      (await store.build({ context: root, ...options })).steps.map((step) => step.cached);
    expect(await steps()).toEqual([false, false, false, false]);
    expect(await steps()).toEqual([true, true, true, true]);
    writeFileSync(join(root, 'src/b.txt'), 'changed');
    expect(await steps()).toEqual([true, true, false, false]);
    writeFileSync(join(root, 'a.txt'), 'changed');
    expect(await steps()).toEqual([false, false, false, false]);
    writeFileSync(join(root, 'unused'), 'x');
    expect(await steps()).toEqual([true, true, true, true]);
    const [first] = await store.list();
    expect(await run(`image:${first!.digest}`, 'ls /bin/busybox')).toContain('busybox');
  });

  test('an ARG that a command can see makes its step anew', async () => {
    const text = 'FROM base\nRUN echo 1 > /1\nARG V\nRUN echo "$V" > /v';
    const steps = async (V: string) =>
      (await build(text, {}, { buildArgs: { V } })).steps.map((step) => step.cached);
    expect(await steps('a')).toEqual([false, false]);
    expect(await steps('b')).toEqual([true, false]);
    expect(await steps('a')).toEqual([true, true]);
  });

  test('a layer that is gone is made again', async () => {
    const text = 'FROM base\nRUN echo gone > /gone';
    const { image } = await build(text);
    await driver.dropLayer(image.layer!);
    const again = await build(text);
    expect(again.steps.map((step) => step.cached)).toEqual([false]);
    expect(again.image.digest).toBe(image.digest);
    expect(await run(`image:${again.image.digest}`, 'cat /gone')).toBe('gone\n');
  });

  test('/tmp lasts from step to step, and no sandbox sees it', async () => {
    const { image } = await build('FROM base\nRUN echo t > /tmp/t\nRUN cat /tmp/t > /t');
    expect(await run(`image:${image.digest}`, 'cat /t; ls -A /tmp')).toBe('t\n');
  });

  test("FROM host: the machine's own programs below what is copied", async () => {
    const { image } = await build(
      "FROM host\nWORKDIR /app\nCOPY . .\nRUN python3 -c \"open('made', 'w').write('made')\"\nENV FOO=bar",
      FILES,
    );
    expect(image.host).toBe(true);
    const sandbox = await driver.create({ image: `rootfs:${image.digest}` });
    const [snippet] = await sandbox.runCode([
      {
        language: 'python',
        source: 'import os; print(os.getcwd(), os.environ["FOO"], open("made").read())',
      },
    ]);
    expect(snippet!.stdout).toBe('/app bar made\n');
    const wrote = await sandbox.exec({ argv: ['sh', '-c', 'echo x > src/new && cat src/new'] });
    expect(wrote.stdout).toBe('x\n');
    await sandbox.stop();
  });

  const refusals: [string, string, string, RegExp, RegExp][] = [
    [
      'apt',
      'FROM host\nRUN apt-get update && apt-get install -y jq',
      'CapabilityMissing',
      /line 2.*one uid/s,
      /docker or podman/,
    ],
    [
      'chown',
      'FROM base\nRUN touch /f && chown 33:33 /f',
      'CapabilityMissing',
      /no file can belong/,
      /Leave the owner out/,
    ],
    [
      'mount',
      'FROM base\nRUN mount -t tmpfs x /mnt',
      'CapabilityMissing',
      /no capabilities/,
      /docker or podman/,
    ],
    ['mknod', 'FROM base\nRUN mknod /d c 1 3', 'CapabilityMissing', /no capabilities/, /docker/],
    [
      'network',
      'FROM base\nRUN wget http://example.org/',
      'CapabilityMissing',
      /no network/,
      /network/,
    ],
    ['usr of the host', 'FROM host\nRUN touch /usr/bin/x', 'CapabilityMissing', /read-only/, /opt/],
    [
      'COPY to usr of the host',
      'FROM host\nCOPY a.txt /usr/lib/',
      'CapabilityMissing',
      /read-only/,
      /opt/,
    ],
    [
      'a failing command',
      'FROM base\n\nRUN echo said >&2; exit 4',
      'ConfigInvalid',
      /line 3.*exit code 4\nsaid/s,
      /./,
    ],
    ['no shell', 'FROM scratch\nRUN ls', 'ConfigInvalid', /not found|126|127/, /./],
    [
      'an unknown image',
      'FROM ubuntu:24.04',
      'NotFound',
      /ubuntu:24.04/,
      /docker save ubuntu:24.04/,
    ],
    ['an image that is no name', 'FROM ../../x', 'ConfigInvalid', /no image name/, /./],
    ['no FROM', 'RUN ls', 'ConfigInvalid', /line 1/, /./],
    ['nothing', '# x', 'ConfigInvalid', /no FROM/, /./],
    [
      'VOLUME',
      'FROM base\nRUN true\nVOLUME /x',
      'ConfigInvalid',
      /line 3: VOLUME is not supported/,
      /podman/,
    ],
    ['HEALTHCHECK', 'FROM base\nHEALTHCHECK CMD x', 'ConfigInvalid', /line 2/, /./],
    ['ONBUILD', 'FROM base\nONBUILD RUN x', 'ConfigInvalid', /line 2/, /./],
    ['what is no instruction', 'FROM base\nFOO bar', 'ConfigInvalid', /line 2: FOO/, /./],
    [
      'RUN --mount',
      'FROM base\nRUN --mount=type=cache,target=/x ls',
      'ConfigInvalid',
      /--mount/,
      /./,
    ],
    [
      'ADD from the network',
      'FROM base\nADD https://example.org/x /x',
      'ConfigInvalid',
      /fetch nothing/,
      /COPY/,
    ],
    [
      'ADD of a repository',
      'FROM base\nADD git@example.org:a/b.git /x',
      'ConfigInvalid',
      /fetch nothing/,
      /./,
    ],
    ['ADD of an archive', 'FROM base\nADD x.tar.gz /x', 'ConfigInvalid', /not unpacked/, /tar -xf/],
    ['another platform', 'FROM --platform=linux/s390x base', 'ConfigInvalid', /s390x/, /./],
    ['COPY from above', 'FROM base\nCOPY ../x /x', 'ConfigInvalid', /leads out/, /./],
    ['COPY from far above', 'FROM base\nCOPY src/../../x /x', 'ConfigInvalid', /leads out/, /./],
    ['COPY of nothing', 'FROM base\nCOPY gone /x', 'ConfigInvalid', /no gone/, /./],
    ['COPY of no match', 'FROM base\nCOPY *.none /x/', 'ConfigInvalid', /no \*\.none/, /./],
    [
      'COPY of several to one',
      'FROM base\nCOPY a.txt src/b.txt /x',
      'ConfigInvalid',
      /must end in \//,
      /./,
    ],
    ['COPY to /proc', 'FROM base\nCOPY a.txt /proc/x', 'ConfigInvalid', /kernel/, /./],
    ['COPY with no target', 'FROM base\nCOPY a.txt', 'ConfigInvalid', /SOURCE … TARGET/, /./],
    ['COPY with bad quotes', 'FROM base\nCOPY "a.txt /x', 'ConfigInvalid', /has no end/, /./],
    ['ENV without a value', 'FROM base\nENV A', 'ConfigInvalid', /NAME=VALUE/, /./],
    ['ENV of no name', 'FROM base\nENV 1A=b', 'ConfigInvalid', /no name for a variable/, /./],
    [
      'a stage of later',
      'FROM base AS first\nCOPY --from=later /x /x\nFROM base AS later\nFROM first',
      'NotFound',
      /later/,
      /./,
    ],
    [
      'a file over a folder',
      'FROM base\nRUN touch /f\nCOPY a.txt /f/x',
      'ConfigInvalid',
      /no folder|Not a directory|lies below/,
      /./,
    ],
  ];
  test.each(refusals)('%s is refused with the reason', async (_, text, code, message, next) => {
    const images = (await store.list()).length;
    await expect(build(text, FILES)).rejects.toMatchObject({
      code,
      message: expect.stringMatching(message),
      next: expect.stringMatching(next),
    });
    expect((await store.list()).length).toBe(images);
  });

  test('nothing runs when a later line is not supported', async () => {
    const said: string[] = [];
    await expect(
      build(
        'FROM base\nRUN echo ran\nVOLUME /x',
        {},
        { onProgress: (text) => void said.push(text) },
      ),
    ).rejects.toMatchObject({ code: 'ConfigInvalid' });
    expect(said).toEqual([]);
  });

  test.each([
    ['above', '../../etc/passwd'],
    ['absolute', '/etc/passwd'],
    ['through a folder', 'src/../../x'],
  ])(
    'a link of the context that leads out (%s) is refused, one that stays is copied',
    async (_, target) => {
      const root = context({ ...FILES, Dockerfile: 'FROM base\nCOPY . /c/' });
      symlinkSync('deep/c.md', join(root, 'src/inside'));
      const { image } = await store.build({ context: root });
      expect(await run(`image:${image.digest}`, 'cat /c/src/inside')).toBe('C');
      symlinkSync(target, join(root, 'out'));
      await expect(store.build({ context: root })).rejects.toMatchObject({
        code: 'ConfigInvalid',
        message: expect.stringMatching(/the link out leads out/),
      });
    },
  );

  test('a folder of the context that is a link is not walked', async () => {
    const root = context({ ...FILES, Dockerfile: 'FROM base\nCOPY etc/passwd /p' });
    symlinkSync('/etc', join(root, 'etc'));
    await expect(store.build({ context: root })).rejects.toMatchObject({
      message: expect.stringMatching(/no etc\/passwd/),
    });
    const two = context({ Dockerfile: 'FROM base' });
    rmSync(join(two, 'Dockerfile'));
    symlinkSync(join(root, 'Dockerfile'), join(two, 'Dockerfile'));
    await expect(store.build({ context: two })).rejects.toMatchObject({ code: 'ConfigInvalid' });
  });

  test('a context that is too large, or changes meanwhile, is refused', async () => {
    const root = context(FILES);
    const few = await BuildContext.open(root, { files: 3 });
    await expect(few.select('.')).rejects.toThrow(/more than 3 files/);
    const small = await BuildContext.open(root, { bytes: 4 });
    await expect(small.select('.')).rejects.toThrow(/more than 4 bytes/);
    const whole = await BuildContext.open(root);
    const [selected] = await whole.select('a.txt');
    const copied = [{ entry: selected!.top, to: 'a', mode: 0o644 }];
    const digest = await whole.digest(copied);
    writeFileSync(join(root, 'a.txt'), 'B');
    const read = async () => {
      for await (const _ of whole.tar(copied, digest, (to) => to));
    };
    await expect(read()).rejects.toThrow(/changed/);
  });

  test('the context is nowhere inside, and a build cannot reach the host', async () => {
    const { image } = await build(
      'FROM base\nRUN ls / > /ls; cat /proc/mounts > /mounts; (ls /tmp/owner /workspace; cat /dev/.init; kill -9 1; id -u) > /said 2>&1; true',
      { marker: 'SECRET-MARKER' },
    );
    const said = await run(`image:${image.digest}`, 'cat /ls /mounts /said; ls -A /dev; ls /.init');
    expect(said).not.toContain('context-');
    expect(said).toMatch(/1000/);
    expect(said).toContain('/.init: No such file');
  });

  test('an abort in the middle ends the command and leaves no image; finished steps are kept', async () => {
    const root = context({
      Dockerfile: 'FROM base\nRUN echo first > /1\nRUN echo started; sleep 600',
    });
    const controller = new AbortController();
    const images = (await store.list()).length;
    const building = store.build({
      context: root,
      name: 'half',
      signal: controller.signal,
      onProgress: (text) => {
        if (text.includes('started\n') && !text.includes('line')) controller.abort();
      },
    });
    await expect(building).rejects.toMatchObject({ code: 'Interrupted' });
    expect((await store.list()).length).toBe(images);
    await expect(store.get('half')).rejects.toMatchObject({ code: 'NotFound' });
    writeFileSync(join(root, 'Dockerfile'), 'FROM base\nRUN echo first > /1');
    expect((await store.build({ context: root })).steps).toEqual([{ line: 2, cached: true }]);
  });

  test('RUN reaches what a network policy names, and nothing else', async () => {
    const server = createServer((request, response) => response.end(`served ${request.url}`));
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const { port } = server.address() as AddressInfo;
    const fetch = (url: string) => `RUN unset no_proxy NO_PROXY; wget -q -O /got ${url}`;
    const network = { allow: [{ host: '127.0.0.1', ports: [port], private: true }] };
    try {
      const text = `FROM base\n${fetch(`http://127.0.0.1:${port}/x`)}`;
      const { image } = await build(text, {}, { network });
      expect(await run(`image:${image.digest}`, 'cat /got')).toBe('served /x');
      // Without the policy it is another step, and fails.
      await expect(build(text)).rejects.toThrow(/connect/);
      await expect(
        build(`FROM base\n${fetch('http://example.com/')}`, {}, { network }),
      ).rejects.toThrow(/policy of the build refused example.com:80/);
    } finally {
      server.close();
    }
  });

  test('a command that takes too long is ended', async () => {
    await expect(
      build('FROM base\nRUN sleep 600', {}, { runTimeoutMs: 300 }),
    ).rejects.toMatchObject({
      code: 'ConfigInvalid',
      message: expect.stringMatching(/timeout/),
    });
  });

  test('equal builds side by side, and different ones', async () => {
    const text = (n: number) => `FROM base\nRUN echo both > /both\nRUN echo ${n} > /n`;
    const built = await Promise.all([1, 2, 1].map((n) => build(text(n))));
    expect(built[0]!.image.digest).toBe(built[2]!.image.digest);
    expect(await run(`image:${built[1]!.image.digest}`, 'cat /both /n')).toBe('both\n2\n');
    expect(await run(`image:${built[0]!.image.digest}`, 'cat /both /n')).toBe('both\n1\n');
  });

  test('a target stage, by name', async () => {
    const { image } = await build(
      'FROM base AS a\nRUN echo a > /a\nFROM a\nRUN exit 1',
      {},
      { target: 'a' },
    );
    expect(await run(`image:${image.digest}`, 'cat /a')).toBe('a\n');
    await expect(build('FROM base AS a', {}, { target: 'b' })).rejects.toMatchObject({
      code: 'NotFound',
    });
  });

  test('more steps than a stack of layers holds', async () => {
    const lines = Array.from({ length: 40 }, (_, i) => `RUN echo ${i} > /f${i}; rm -f /f${i - 2}`);
    const { image } = await build(['FROM base', ...lines].join('\n'));
    expect(await run(`image:${image.digest}`, 'cat /f*; ls /bin/sh')).toBe('38\n39\n/bin/sh\n');
  }, 120_000);

  test('a builder that is killed leaves no half image and no half layer', async () => {
    const dir = join(home, 'killed');
    const root = context({
      Dockerfile: `${BASE}RUN for i in 1 2 3 4 5 6 7 8 9; do echo $i > /$i; done\nRUN echo end; sleep 600`,
    });
    const module = fileURLToPath(new URL('../../index.ts', import.meta.url));
    const images = fileURLToPath(new URL('../index.ts', import.meta.url));
    const script = `
      import { BubblewrapDriver } from ${JSON.stringify(module)};
      import { ImageStore } from ${JSON.stringify(images)};
      const driver = await BubblewrapDriver.open({ dir: ${JSON.stringify(dir)}, warm: 0 });
      const store = new ImageStore({ driver });
      await store.build({ context: ${JSON.stringify(root)}, name: 'x', onProgress: (t) => process.stdout.write(t) });`;
    for (const until of ['line 3', 'line 5', 'end\n']) {
      const child = spawn(process.execPath, [
        '--no-warnings',
        '--input-type=module',
        '--eval',
        script,
      ]);
      await new Promise<void>((resolve) => {
        child.stdout.on('data', (chunk: Buffer) => {
          if (chunk.toString().includes(until)) child.kill('SIGKILL');
        });
        child.once('exit', () => resolve());
      });
      const names = (folder: string) => (existsSync(folder) ? readdirSync(folder) : []);
      expect(names(join(dir, 'images')).filter((name) => name.endsWith('.json'))).toEqual([]);
      expect(names(join(dir, 'images', 'names'))).toEqual([]);
    }
    writeFileSync(
      join(root, 'Dockerfile'),
      `${BASE}RUN for i in 1 2 3 4 5 6 7 8 9; do echo $i > /$i; done`,
    );
    const again = await BubblewrapDriver.open({ dir, warm: 0 });
    const { image, steps } = await new ImageStore({ driver: again }).build({ context: root });
    expect(steps.map((step) => step.cached)).toEqual([true, true, true]);
    const sandbox = await again.create({ image: `image:${image.digest}` });
    const read = await sandbox.exec({ argv: ['sh', '-c', 'cat /1 /9'] });
    expect(read.stdout).toBe('1\n9\n');
    await sandbox.stop();
    await again.close();
  }, 60_000);
});
