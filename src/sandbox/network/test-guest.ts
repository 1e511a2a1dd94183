import assert from 'node:assert/strict';
import { setImmediate as turn } from 'node:timers/promises';
import type { NetworkAttempt, NetworkRule } from '../contract.ts';
import { NetworkProxy } from './proxy.ts';
import { Origin, relayed, untilEnd } from './test-origin.ts';

export const SECRET = 'sk-test-1234567890';
const NAMES = ['web.test', 'api.test', 'private.test', 'rebind.test'];

/** A real proxy with short limits before real servers, with names of its own, and guests of it. */
export class TestProxy {
  /** Names that were looked up. */
  readonly looked: string[] = [];
  readonly environment: NodeJS.ProcessEnv = {
    KEY: SECRET,
    SHORT: 'abc',
    BROKEN: 'abcdefgh\r\nHost: evil',
  };
  readonly origin = new Origin(NAMES);
  #proxy: NetworkProxy | null = null;
  #sids = 0;

  async open(): Promise<this> {
    await this.origin.open();
    this.#proxy = await NetworkProxy.open({
      socketPath: this.#socketPath,
      lookup: (name) => this.#lookup(name),
      ca: [this.origin.certificates.ca],
      environment: this.environment,
      limits: { headerMs: 1500, helloMs: 3000, connectMs: 1500, idleMs: 3000, connections: 4 },
    });
    return this;
  }

  get #socketPath(): string {
    return `${this.origin.folder}/proxy`;
  }

  async #lookup(name: string): Promise<readonly string[]> {
    const { looked, origin } = this;
    looked.push(name);
    if (name === 'meta.test') return ['169.254.169.254'];
    if (name === 'mapped.test') return ['::ffff:169.254.169.254', 'fe80::1%eth0', '::1'];
    if (name === 'empty.test') return [];
    if (name === 'slow.test') return new Promise(() => {});
    if (name === 'closed.test') return ['127.0.0.254'];
    // Another address each time: whoever asks twice is led astray.
    if (name === 'rebind.test')
      return looked.filter((each) => each === name).length === 1
        ? [origin.address]
        : ['127.0.0.254'];
    if (NAMES.includes(name) || name === 'untrusted.test') return [origin.address];
    throw Object.assign(new Error('no such name'), { code: 'ENOTFOUND' });
  }

  guest(...allow: unknown[]) {
    const sid = `box-${this.#sids++}`;
    const handle = this.#proxy!.register(sid, { allow: allow as NetworkRule[] });
    const dial = () => relayed(this.#socketPath, sid);
    /** Sends pieces, each a packet of its own, and reads to the end. */
    const send = async (...pieces: (string | Buffer)[]) => {
      const socket = dial();
      const answer = untilEnd(socket);
      for (const piece of pieces) {
        socket.write(typeof piece === 'string' ? Buffer.from(piece, 'latin1') : piece);
        if (pieces.length > 1) await turn();
      }
      return answer;
    };
    return { sid, handle, dial, send };
  }

  async close(): Promise<void> {
    await this.#proxy?.close();
    await this.origin.close();
  }
}

export const get = (url: string, host: string, ...more: string[]) =>
  [`GET ${url} HTTP/1.1`, `Host: ${host}`, 'Connection: close', ...more, '', ''].join('\r\n');
export const connectTo = (target: string, ...more: string[]) =>
  [`CONNECT ${target} HTTP/1.1`, `Host: ${target}`, ...more, '', ''].join('\r\n');

export type Expected = Pick<NetworkAttempt, 'host' | 'port' | 'method' | 'outcome'> & {
  detail: string;
};

/** Compares whole records; `bytes` where some passed. `detail` need only be part of it, a host of null is any. */
export function expectAttempts(
  attempts: readonly NetworkAttempt[],
  ...expected: (Omit<Expected, 'host'> & { host: string | null; bytes?: boolean })[]
) {
  const shown = attempts.map(({ at, detail, bytesUp, bytesDown, ...rest }, index) => {
    const wanted = expected[index];
    assert.ok(at <= Date.now());
    return {
      ...rest,
      host: wanted?.host === null ? null : rest.host,
      detail: wanted && detail.includes(wanted.detail) ? wanted.detail : detail,
      bytes: bytesUp > 0 || bytesDown > 0,
    };
  });
  assert.deepEqual(
    shown,
    expected.map((each) => ({ bytes: false, ...each })),
  );
}
