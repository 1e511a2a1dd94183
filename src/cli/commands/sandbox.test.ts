import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { asTar, dockerSave, tar } from '../../sandbox/images/test-archives.ts';
import { probeBubblewrap } from '../../sandbox/index.ts';
import { exitCodeOf } from './sandbox.ts';

const home = mkdtempSync(join(tmpdir(), 'longhaul-cli-sandbox-'));
const program = join(import.meta.dirname, '..', '..', '..', 'bin', 'longhaul.js');
const probe = await probeBubblewrap({ dir: join(home, 'sandbox') });
const without = probe.ok ? '' : ` (skipped: ${probe.reason})`;

afterAll(() => rmSync(home, { recursive: true, force: true }));

function start(...args: string[]): ChildProcess {
  return spawn(process.execPath, [program, 'sandbox', 'exec', '--home', home, ...args], {
    stdio: ['pipe', 'pipe', 'pipe'],
  });
}

interface Ended {
  code: number | null;
  stdout: string;
  stderr: string;
}

async function ended(child: ChildProcess, stdin?: string): Promise<Ended> {
  const text = { stdout: '', stderr: '' };
  for (const name of ['stdout', 'stderr'] as const)
    child[name]!.on('data', (chunk) => {
      text[name] += chunk;
    });
  child.stdin!.on('error', () => {});
  if (stdin === undefined) child.stdin!.end();
  else child.stdin!.end(stdin);
  const [code] = await once(child, 'close');
  return { code, ...text };
}

const run = (...args: string[]): Promise<Ended> => ended(start(...args));

/** Processes of this machine whose command line has a word that no other test uses. */
const processesNaming = (word: string): string[] =>
  readdirSync('/proc').filter((pid) => {
    if (!/^\d+$/.test(pid)) return false;
    try {
      return readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0').includes(word);
    } catch {
      return false;
    }
  });

async function untilRunning(word: string): Promise<void> {
  for (let i = 0; i < 500 && processesNaming(word).length === 0; i++) await sleep(20);
  expect(processesNaming(word)).not.toEqual([]);
}

/** Whether a command line has started the process that holds its sandbox's mounts. */
const sandboxIsOpen = (owner: number): boolean =>
  readdirSync('/proc').some((pid) => {
    if (!/^\d+$/.test(pid)) return false;
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
      const parent = Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]);
      return (
        parent === owner && readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes('supervisor')
      );
    } catch {
      return false;
    }
  });

/** A killed process is listed until the kernel has taken it down. */
async function untilGone(word: string): Promise<void> {
  for (let i = 0; i < 500 && processesNaming(word).length > 0; i++) await sleep(20);
  expect(processesNaming(word)).toEqual([]);
}

describe('usage errors start nothing', () => {
  test.each([
    ['no command', []],
    ['no command after --', ['--']],
    ['a command and a snippet', ['--python', 'print(1)', '--', 'ls']],
    ['an unknown option', ['--bogus', '--', 'ls']],
    ['an option of the command before --', ['ls', '-l']],
    ['a negative size', ['--memory', '-512m', '--', 'ls']],
    ['a size without sense', ['--disk', '512q', '--', 'ls']],
    ['no time', ['--timeout', '0', '--', 'ls']],
    ['no processes', ['--pids', '0', '--', 'ls']],
    ['an image without sense', ['--image', 'ubuntu', '--', 'ls']],
    ['a rule without sense', ['--allow', 'http://example.org/', '--', 'ls']],
  ])('%s', async (_, args) => {
    const { code, stdout, stderr } = await run(...args);
    expect(code).toBe(2);
    expect(stdout).toBe('');
    expect(stderr).toMatch(/error: /);
  });

  test('with --json they are one document', async () => {
    const { code, stdout } = await run('--json', '--memory', 'much', '--', 'ls');
    expect(code).toBe(2);
    expect(JSON.parse(stdout)).toMatchObject({ error: { code: 'ConfigInvalid', class: 'usage' } });
  });

  test('a --json of the command is not ours', async () => {
    const { code, stdout } = await run('--memory', 'much', '--', 'ls', '--json');
    expect(code).toBe(2);
    expect(stdout).toBe('');
  });
});

test.each([
  [{ cause: 'exited', code: 3, signal: null }, 3],
  [{ cause: 'exited', code: 0, signal: null }, 0],
  [{ cause: 'timeout', code: null, signal: 'SIGKILL' }, 124],
  [{ cause: 'signalled', code: null, signal: 'SIGTERM' }, 143],
  [{ cause: 'out_of_memory', code: null, signal: 'SIGKILL' }, 137],
  [{ cause: 'killed', code: null, signal: null }, 137],
] as const)('%j gives exit code %i', (result, code) => {
  expect(exitCodeOf(result)).toBe(code);
});

describe.skipIf(without !== '')(`in a real sandbox${without}`, () => {
  test('output and exit code are the command’s', async () => {
    const { code, stdout, stderr } = await run('--', 'sh', '-c', 'echo out; echo err >&2; exit 7');
    expect({ code, stdout, stderr }).toEqual({ code: 7, stdout: 'out\n', stderr: 'err\n' });
  });

  test('arguments reach the command as they are', async () => {
    const odd = ['--json', '--memory', '', 'a b', '$HOME', '*', '-', '--'];
    const { stdout } = await run('--', 'printf', '<%s>', ...odd);
    expect(stdout).toBe(odd.map((each) => `<${each}>`).join(''));
  });

  test('large binary output comes whole and unchanged', async () => {
    const child = start(
      '--',
      'python3',
      '-c',
      'import sys; sys.stdout.buffer.write(bytes(range(256)) * 8192)',
    );
    const chunks: Buffer[] = [];
    child.stdout!.on('data', (chunk) => chunks.push(chunk));
    child.stdin!.end();
    const [code] = await once(child, 'close');
    expect(code).toBe(0);
    const block = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
    expect(Buffer.concat(chunks).equals(Buffer.concat(Array(8192).fill(block)))).toBe(true);
  });

  test('a command that is not there ends with 127', async () => {
    const { code, stderr } = await run('--', 'no-such-command');
    expect(code).toBe(127);
    expect(stderr).toContain('no-such-command');
  });

  test('a file that is no program ends with 126', async () => {
    expect((await run('--', '/etc/passwd')).code).toBe(126);
  });

  test('a signal n gives 128 + n', async () => {
    const { code, stderr } = await run('--', 'sh', '-c', 'kill -TERM $$');
    expect(code).toBe(143);
    expect(stderr).toMatch(/SIGTERM/);
  });

  test('a time-out kills the whole tree, ends with 124 and says so', async () => {
    const { code, stdout, stderr } = await run(
      ...['--timeout', '500ms', '--', 'sh', '-c'],
      'echo begun; trap "" TERM; setsid sleep 31415926 & sleep 31415926',
    );
    expect(code).toBe(124);
    expect(stdout).toBe('begun\n');
    expect(stderr).toMatch(/ran past 500 ms/);
    await untilGone('31415926');
  });

  test('a memory bomb ends with a failure that is the command’s, not the machine’s', async () => {
    const { code, stderr } = await run(
      ...['--memory', '64m', '--disk', '8m', '--', 'python3', '-c'],
      'held = []\nwhile True: held.append(bytearray(b"x" * 1048576))',
    );
    // By the kernel's kill, or where there is no control group by a failed allocation.
    expect([137, 1]).toContain(code);
    expect(stderr).toMatch(/ran out of memory|MemoryError/);
  });

  test('--pids bounds a fork bomb', async () => {
    const { code, stdout } = await run(
      ...['--pids', '16', '--', 'python3', '-c'],
      'import os, time\nn = 0\ntry:\n  while n < 200:\n    if os.fork() == 0: time.sleep(5); os._exit(0)\n    n += 1\nexcept OSError: pass\nprint(n)',
    );
    expect(code).toBe(0);
    expect(Number(stdout)).toBeLessThanOrEqual(20);
  });

  test('--disk bounds the workspace', async () => {
    const { code, stderr } = await run(
      ...['--disk', '2m', '--', 'dd', 'if=/dev/zero', 'of=big', 'bs=1M', 'count=64'],
    );
    expect(code).toBe(1);
    expect(stderr).toMatch(/No space left/);
  });

  test('limits too low to start are wrong usage', async () => {
    const { code, stderr } = await run('--memory', '1k', '--', 'ls');
    expect(code).toBe(2);
    expect(stderr).toMatch(/too low|at least/);
  });

  test.each(['dir:/no/such/root', 'no/such/image', './no-such-folder'])(
    'an image that is not there is refused before anything runs: %s',
    async (image) => {
      const { code, stdout, stderr } = await run('--image', image, '--', 'echo', 'ran');
      expect(code).toBe(2);
      expect(stdout).toBe('');
      expect(stderr).toMatch(/next: {2}\S/);
    },
  );

  test('a directory with a Dockerfile is built once, and commands start where it says', async () => {
    const context = mkdtempSync(join(home, 'context-'));
    writeFileSync(
      join(context, 'Dockerfile'),
      'FROM host\nWORKDIR /opt/app\nENV GREETING=hello\nRUN echo built > made\n',
    );
    const command = [
      '--image',
      context,
      '--',
      'sh',
      '-c',
      'echo $GREETING; pwd; cat made; echo > new',
    ];
    const first = await run(...command);
    expect(first).toMatchObject({ code: 0, stdout: 'hello\n/opt/app\nbuilt\n' });
    expect(first.stderr).toMatch(/line 4: RUN echo built > made\n/);
    const second = await run(...command);
    expect(second).toMatchObject({ code: 0, stdout: first.stdout });
    expect(second.stderr).toMatch(/line 4: RUN echo built > made \(cached\)/);
  });

  test('a build that fails says where, and nothing runs', async () => {
    const context = mkdtempSync(join(home, 'context-'));
    writeFileSync(join(context, 'Dockerfile'), 'FROM host\nRUN echo oh no >&2; exit 3\n');
    const { code, stdout, stderr } = await run('--image', context, '--', 'echo', 'ran');
    expect({ code, stdout }).toEqual({ code: 2, stdout: '' });
    expect(stderr).toMatch(/Dockerfile line 2: RUN failed, exit code 3\noh no/);
  });

  test('an interrupted build leaves no image, and goes on from its finished steps', async () => {
    const context = mkdtempSync(join(home, 'context-'));
    const word = `/tmp/${basename(context)}`;
    writeFileSync(
      join(context, 'Dockerfile'),
      `FROM host\nRUN echo a > /srv/a\nRUN ["tail", "-f", "/dev/null", "${word}"]\n`,
    );
    const child = start('--image', context, '--', 'echo', 'ran');
    const ending = ended(child);
    await untilRunning(word);
    child.kill('SIGINT');
    expect(await ending).toMatchObject({ code: 130, stdout: '' });
    expect(processesNaming(word)).toEqual([]);
    const again = start('--image', context, '--', 'echo', 'ran');
    const second = ended(again);
    await untilRunning(word);
    again.kill('SIGINT');
    expect((await second).stderr).toMatch(/line 2: .* \(cached\)/);
  });

  test('an archive is added under its name', async () => {
    const archive = join(home, 'image.tar');
    const entry = { name: 'greeting', content: 'hello\n' };
    writeFileSync(archive, asTar(dockerSave({ layers: [tar([entry])], name: 'acme/greeting:1' })));
    const argv = ['--', 'ls', '/'];
    // It has no program of its own: that it was found is what counts.
    expect(await run('--image', archive, ...argv)).toMatchObject({ code: 127 });
    expect(await run('--image', 'acme/greeting:1', ...argv)).toMatchObject({ code: 127 });
    expect(await run('--image', 'acme/greeting:2', ...argv)).toMatchObject({ code: 2 });
  });

  test('images need bubblewrap, and the message says so', async () => {
    const { code, stderr } = await run(
      ...['--sandbox', 'wasm', '--image', 'acme/greeting:1', '--python', 'print(1)'],
    );
    expect(code).toBe(2);
    expect(stderr).toMatch(/images are built and run in bubblewrap sandboxes, and this is wasm/);
  });

  test('there is no network unless it is allowed', async () => {
    const { code } = await run(
      '--',
      'python3',
      '-c',
      'import socket; socket.create_connection(("127.0.0.1", 22), 2)',
    );
    expect(code).toBe(1);
  });

  describe('--allow', () => {
    /** Asks the proxy by hand: clients leave loopback addresses out, which inside are the guest's own. */
    const ask = (port: number) => [
      ...['--', 'python3', '-c'],
      [
        'import http.client, os, urllib.parse',
        'proxy = urllib.parse.urlsplit(os.environ["HTTP_PROXY"])',
        'c = http.client.HTTPConnection(proxy.hostname, proxy.port)',
        `c.request("GET", "http://127.0.0.1:${port}/x")`,
        'r = c.getresponse()',
        'print(r.status, r.read().decode())',
      ].join('\n'),
    ];
    const origin = createServer((_, response) => response.end('reached'));
    let port = 0;
    beforeAll(async () => {
      origin.listen(0, '127.0.0.1');
      await once(origin, 'listening');
      port = (origin.address() as AddressInfo).port;
    });
    afterAll(() => origin.close());

    test('lets through what it names, and a loopback address that is written down', async () => {
      const { code, stdout } = await run('--allow', `127.0.0.1:${port}`, ...ask(port));
      expect({ code, stdout }).toEqual({ code: 0, stdout: '200 reached\n' });
    });

    test('lets nothing else through, and says what was refused', async () => {
      const { stdout, stderr } = await run(
        ...['--allow', 'example.org:443', '--allow', '127.0.0.1:1'],
        ...ask(port),
      );
      expect(stdout).toMatch(/^403 /);
      expect(stdout).not.toContain('reached');
      expect(stderr).toMatch(new RegExp(`network: 127\\.0\\.0\\.1:${port} refused: `));
    });

    test('--json lists the attempts', async () => {
      const { stdout } = await run('--json', '--allow', 'example.org', ...ask(port));
      expect(JSON.parse(stdout)).toMatchObject({
        spec: { network: { allow: [{ host: 'example.org' }] } },
        networkAttempts: [{ host: '127.0.0.1', port, method: 'GET', outcome: 'refused' }],
      });
    });
  });

  test('--python runs a snippet', async () => {
    const { code, stdout, stderr } = await run(
      '--python',
      'import sys; print(6*7); sys.stderr.write("err\\n"); sys.exit(5)',
    );
    expect({ code, stdout, stderr }).toEqual({ code: 5, stdout: '42\n', stderr: 'err\n' });
  });

  test('--python ends in time', async () => {
    const { code, stderr } = await run('--timeout', '300ms', '--python', 'while True: pass');
    expect(code).toBe(124);
    expect(stderr).toMatch(/ran past 300 ms/);
  });

  test('--stdin reaches a command and a snippet; without it there is none', async () => {
    expect((await ended(start('--stdin', '--', 'tr', 'a-z', 'A-Z'), 'words\n')).stdout).toBe(
      'WORDS\n',
    );
    const snippet = start('--stdin', '--python', 'print(input()[::-1])');
    expect((await ended(snippet, 'abc\n')).stdout).toBe('cba\n');
    expect((await ended(start('--', 'cat'), 'unread')).stdout).toBe('');
  });

  test('a command that does not read its input ends all the same', async () => {
    const { code } = await ended(start('--stdin', '--', 'true'), 'x'.repeat(4 * 2 ** 20));
    expect(code).toBe(0);
  });

  test('standard input is passed on as it comes', async () => {
    const child = start('--stdin', '--', 'cat');
    child.stdin!.write('first\n');
    const [first] = await once(child.stdout!, 'data');
    expect(String(first)).toBe('first\n');
    child.stdin!.end('second\n');
    const [second] = await once(child.stdout!, 'data');
    expect(String(second)).toBe('second\n');
    expect((await once(child, 'close'))[0]).toBe(0);
  });

  test.each([
    ['SIGINT', 130],
    ['SIGTERM', 143],
  ] as const)(
    'output comes before the end; %s ends the command and leaves nothing',
    async (signal, expected) => {
      const child = start('--', 'sh', '-c', 'echo begun; sleep 27182818');
      const closed = once(child, 'close');
      const [first] = await once(child.stdout!, 'data');
      expect(String(first)).toBe('begun\n');
      await untilRunning('27182818');
      child.kill(signal);
      expect((await closed)[0]).toBe(expected);
      await untilGone('27182818');
    },
  );

  test.each([
    ['a snippet', ['--python', 'print(1, flush=True)\nwhile True: pass']],
    ['input that does not come', ['--stdin', '--python', 'print(1)']],
    ['input of a command', ['--stdin', '--', 'cat']],
  ])('SIGINT ends %s', async (_, args) => {
    const child = start('--json', ...args);
    const closed = once(child, 'close');
    let stdout = '';
    child.stdout!.on('data', (chunk) => {
      stdout += chunk;
    });
    for (let i = 0; i < 500 && !sandboxIsOpen(child.pid!); i++) await sleep(20);
    // Most likely in the middle of it; what must hold, holds at any moment from here on.
    await sleep(300);
    child.kill('SIGINT');
    expect((await closed)[0]).toBe(130);
    expect(JSON.parse(stdout)).toMatchObject({ driver: 'bubblewrap', exitCode: 130 });
  });

  const root = process.getuid?.() === 0;
  test.skipIf(!root)(
    `without bubblewrap a command is refused as the machine's lack${root ? '' : ' (skipped: needs root)'}`,
    async () => {
      const hide = 'mount --bind /dev/null "$(command -v bwrap)"; exec "$@"';
      const child = spawn(
        'unshare',
        [
          ...['--mount', 'sh', '-ec', hide, 'sh', process.execPath, program],
          ...['sandbox', 'exec', '--home', home, '--', 'echo', 'ran'],
        ],
        { stdio: ['pipe', 'pipe', 'pipe'] },
      );
      const { code, stdout, stderr } = await ended(child);
      expect({ code, stdout }).toEqual({ code: 3, stdout: '' });
      expect(stderr).toMatch(/runs no commands; bubblewrap: .*\n.*next: /);
    },
  );

  test('kill -9 of the command line leaves nothing', async () => {
    const child = start('--', 'sleep', '16180339');
    const closed = once(child, 'close');
    await untilRunning('16180339');
    child.kill('SIGKILL');
    await closed;
    await untilGone('16180339');
  });

  test('a reader that goes away ends the command', async () => {
    const child = start('--', 'yes');
    const closed = once(child, 'close');
    await once(child.stdout!, 'data');
    child.stdout!.destroy();
    expect((await closed)[0]).toBe(141);
  });

  test('--json prints one document and nothing else', async () => {
    const { code, stdout } = await run(
      '--json',
      '--memory',
      '256m',
      '--',
      'sh',
      '-c',
      'printf "\\033]0;x\\007"; exit 3',
    );
    expect(code).toBe(3);
    expect(stdout).not.toContain('\u001b');
    expect(stdout.trim().split('\n')).toHaveLength(1);
    expect(JSON.parse(stdout)).toMatchObject({
      driver: 'bubblewrap',
      isolation: 'namespaces',
      exitCode: 3,
      spec: { memoryBytes: 256 * 2 ** 20, network: 'none' },
      result: { cause: 'exited', code: 3, stdout: '\u001b]0;x\u0007', stderr: '' },
      usage: { oomKills: 0 },
      networkAttempts: [],
    });
  });

  test('a real terminal is not obeyed to; a pipe gets the bytes as they are', async () => {
    const sequence = '\u001b]0;owned\u0007\u001b[31mred\u009b0m';
    const guest = ['--', 'printf', '%s', sequence];
    expect((await run(...guest)).stdout).toBe(sequence);
    const terminal = spawn(
      'python3',
      [
        '-c',
        'import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))',
        ...[process.execPath, program, 'sandbox', 'exec', '--home', home, ...guest],
      ],
      { stdio: ['pipe', 'pipe', 'pipe'], env: { ...process.env, NO_COLOR: '1' } },
    );
    const { code, stdout } = await ended(terminal);
    expect(code).toBe(0);
    expect(stdout).not.toMatch(/[\u001b\u0007\u009b]/);
    expect(stdout).toContain('owned');
    expect(stdout).toContain('red');
  });
});
