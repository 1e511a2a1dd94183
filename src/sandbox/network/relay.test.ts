import { execFile, spawnSync } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { PROXY_PORT, proxyEnvironment } from './environment.ts';
import type { NetworkHandle } from './proxy.ts';
import { NetworkProxy } from './proxy.ts';
import { Origin } from './test-origin.ts';

const MIB = 1024 * 1024;
const run = promisify(execFile);
const root = process.getuid?.() === 0;
const namespaces = root && spawnSync('unshare', ['-n', 'true']).status === 0;

/** What the supervisor does: a listener in the sandbox's network, a process that relays, then the guest. */
const HARNESS = `
import fcntl, os, signal, socket, struct, subprocess, sys, time
relay_folder, path, sid, limit, *command = sys.argv[1:]
sys.path.insert(0, relay_folder)
import relay
with socket.socket() as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS: up
listener = socket.create_server(("127.0.0.1", ${PROXY_PORT}), backlog=64)
pid = os.fork()
if pid == 0:
    relay.serve(listener, path, sid, int(limit))
listener.close()
try:
    code = subprocess.call(command)
    with open(f"/proc/{pid}/status") as status:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    for _ in range(200):  # it learns of the last ends a moment later
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        if descriptors <= 6:
            break
        time.sleep(0.05)
    print(f"relay: {peak} {descriptors}", file=sys.stderr)
finally:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
sys.exit(code)
`;

let origin: Origin;
let proxy: NetworkProxy;
let socketPath: string;
let handle: NetworkHandle;
const SECRET = 'sk-test-1234567890';

beforeAll(async () => {
  if (!namespaces) return;
  origin = await new Origin(['web.test', 'api.test']).open();
  // Longer than the address of a unix socket may be.
  const folder = join(origin.folder, 'x'.repeat(120));
  mkdirSync(folder);
  writeFileSync(join(origin.folder, 'harness.py'), HARNESS);
  socketPath = join(folder, 'proxy');
  proxy = await NetworkProxy.open({
    socketPath,
    lookup: async () => [origin.address],
    ca: [origin.certificates.ca],
    environment: { KEY: SECRET },
  });
  const private_ = { private: true };
  handle = proxy.register('box', {
    allow: [
      { host: 'web.test', ...private_ },
      { host: 'web.test', ports: [7], ...private_ },
      { host: 'api.test', upgrade: true, inject: { 'X-Key': { env: 'KEY' } }, ...private_ },
    ],
  });
});

afterAll(async () => {
  await proxy?.close();
  await origin?.close();
});

function inside(command: readonly string[], limit = 64, path = socketPath) {
  const harness = [
    join(origin.folder, 'harness.py'),
    import.meta.dirname,
    path,
    'box',
    String(limit),
  ];
  return run('unshare', ['-n', 'python3', '-B', ...harness, ...command], {
    env: {
      PATH: process.env.PATH,
      ...proxyEnvironment,
      CURL_CA_BUNDLE: join(origin.folder, 'ca'),
      SSL_CERT_FILE: join(origin.folder, 'ca'),
    },
    maxBuffer: 64 * MIB,
  });
}

const relayOf = (stderr: string) => {
  const [, peak, descriptors] = /relay: (\d+) (\d+)/.exec(stderr)!;
  return { peakBytes: Number(peak) * 1024, descriptors: Number(descriptors) };
};

const python = (...lines: string[]) => ['python3', '-c', lines.join('\n')];

describe.skipIf(!namespaces)(
  'a network namespace of its own needs root: from inside, through the relay',
  () => {
    test('curl reaches HTTP and HTTPS hosts by the variables', async () => {
      const plain = await inside(['curl', '-sS', '-i', 'http://web.test/a']);
      expect(plain.stdout).toMatch(/^HTTP\/1.1 200 .*"secure":false/s);
      const secure = await inside(['curl', '-sS', 'https://web.test/a']);
      expect(secure.stdout).toContain('"secure":true');
      expect(handle.attempts().slice(-2)).toMatchObject([
        { method: 'GET', port: 80, outcome: 'allowed' },
        { method: 'CONNECT', port: 443, outcome: 'allowed' },
      ]);
    });

    test('Python does, and so does Node', async () => {
      const fetchBoth = ['http', 'https'].map(
        (scheme) => `print(urllib.request.urlopen('${scheme}://web.test/').read())`,
      );
      const { stdout } = await inside(python('import urllib.request', ...fetchBoth));
      expect(stdout).toMatch(/"secure":false.*"secure":true/s);
      const node = await inside([
        process.execPath,
        '-e',
        // It tunnels plain HTTP too.
        "fetch('http://api.test/').then((r) => r.text()).then(console.log)",
      ]);
      expect(node.stdout).toContain('"secure":true');
      expect(node.stdout).not.toContain(SECRET);
      expect(handle.attempts().slice(-2)).toMatchObject([
        { method: 'CONNECT', port: 80, outcome: 'allowed' },
        { method: 'GET', port: 80, outcome: 'allowed', detail: origin.address },
      ]);
    });

    test('a secret is used and never seen', async () => {
      origin.received.length = 0;
      const { stdout } = await inside(['curl', '-sS', '-i', 'http://api.test/']);
      expect(origin.received[0]).toMatchObject({ secure: true });
      expect(origin.received[0]!.headers).toContain(SECRET);
      expect(stdout).toMatch(/ 200 /);
      expect(stdout).not.toContain(SECRET);
    });

    test('a refusal can be read', async () => {
      const refused = await inside(['curl', '-sS', 'http://169.254.169.254/latest/']);
      expect(refused.stdout).toMatch(/^longhaul proxy: no rule allows 169.254.169.254 \(port 80\)/);
      await expect(inside(['curl', '-sS', 'https://evil.test/'])).rejects.toMatchObject({
        stderr: expect.stringContaining('403'),
      });
    });

    test('nothing is reached around the proxy', async () => {
      const direct = ['curl', '-sS', '--noproxy', '*', '-m', '5'];
      const { address } = origin;
      await expect(inside([...direct, `http://${address}/`])).rejects.toMatchObject({ code: 7 });
      await expect(inside([...direct, 'http://web.test/'])).rejects.toMatchObject({ code: 6 });
    });

    test('each side may end before the other', async () => {
      const { stdout } = await inside(
        python(
          'import socket',
          `s = socket.create_connection(("127.0.0.1", ${PROXY_PORT}))`,
          's.sendall(b"CONNECT web.test:7 HTTP/1.1\\r\\nHost: web.test:7\\r\\n\\r\\n")',
          's.sendall(b"x" * 1000000)',
          's.shutdown(socket.SHUT_WR)',
          'print(sum(len(c) for c in iter(lambda: s.recv(65536), b"")))',
        ),
      );
      expect(Number(stdout)).toBe(1_000_000 + 'HTTP/1.1 200 Connection established\r\n\r\n'.length);
    });

    test('200 MB each way in little memory', async () => {
      const total = 200 * MIB;
      const down = await inside([
        ...['curl', '-sS', '-H', 'Connection: close', '-o', '/dev/null', '-w', '%{size_download}'],
        `https://web.test/endless?${total}`,
      ]);
      expect(Number(down.stdout)).toBe(total);
      expect(relayOf(down.stderr).peakBytes).toBeLessThan(40 * MIB);
      const up = await inside([
        'sh',
        '-c',
        `head -c ${total} /dev/zero | curl -sS -T - http://web.test/count`,
      ]);
      expect(Number(up.stdout)).toBe(total);
      expect(relayOf(up.stderr).peakBytes).toBeLessThan(40 * MIB);
    });

    test('more connections than it takes wait their turn, and none is left over', async () => {
      const { stdout, stderr } = await inside(
        [
          'curl',
          '-sS',
          '-Z',
          '-H',
          'Connection: close',
          '--parallel-max',
          '20',
          'http://web.test/[1-40]',
          '-H',
          'Connection: close',
          '-o',
          '/dev/null',
          '-w',
          '%{http_code} ',
        ],
        3,
      );
      expect(stdout.trim().split(' ')).toEqual(new Array(40).fill('200'));
      // The standard three, the listener, the selector and one that is inherited.
      expect(relayOf(stderr).descriptors).toBeLessThanOrEqual(6);
    });

    test('guests that break off leave nothing behind', async () => {
      const { stderr } = await inside(
        python(
          'import socket, struct, time',
          'for _ in range(200):',
          `    s = socket.create_connection(("127.0.0.1", ${PROXY_PORT}))`,
          '    s.sendall(b"GET http://web.test/endless?99999999 HTTP/1.1\\r\\nHost: web.test\\r\\n\\r\\n")',
          '    s.recv(1)',
          '    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))',
          '    s.close()',
          `s = socket.create_connection(("127.0.0.1", ${PROXY_PORT}))`,
          's.sendall(b"GET http://web.test/ HTTP/1.1\\r\\nHost: web.test\\r\\nConnection: close\\r\\n\\r\\n")',
          'while s.recv(65536): pass',
          's.close(); time.sleep(0.5)',
        ),
        8,
      );
      expect(relayOf(stderr).descriptors).toBeLessThanOrEqual(6);
    });

    test('when the proxy is gone a connection ends at once', async () => {
      const gone = inside(['curl', '-sS', 'http://web.test/'], 64, `${socketPath}-gone`);
      await expect(gone).rejects.toMatchObject({
        stderr: expect.stringMatching(/reset|Empty reply/i),
      });
    });
  },
);
