import type { Socket } from 'node:net';
import { Duplex } from 'node:stream';

const LENGTH_BYTES = 4;
/** What counts to the length of a frame besides what its first field says: see agent/channel.ts. */
const PREFIX_BYTES = 8;

/**
 * The agent's port. A saved machine may have said half a frame: `partial` is that half, which the
 * channel of the machine that goes on from there must hear first.
 */
export class AgentStream extends Duplex {
  readonly #socket: Socket;
  readonly #held: { chunk: Buffer; done: (error?: Error | null) => void }[] = [];
  #holding = false;
  #tail: Buffer[] = [];
  #have = 0;
  #heard = 0;

  constructor(socket: Socket, partial: Buffer = Buffer.alloc(0)) {
    super();
    this.#socket = socket;
    socket.on('data', (chunk: Buffer) => this.#receive(chunk));
    socket.on('error', (error) => this.destroy(error));
    socket.on('close', () => this.destroy());
    if (partial.length > 0) this.#receive(partial);
  }

  #receive(chunk: Buffer): void {
    this.#heard += chunk.length;
    this.#follow(chunk);
    if (!this.push(chunk)) this.#socket.pause();
  }

  /** Keeps what belongs to a frame that has not ended. */
  #follow(chunk: Buffer): void {
    this.#tail.push(chunk);
    this.#have += chunk.length;
    for (;;) {
      if (this.#have < LENGTH_BYTES) return;
      if (this.#tail[0]!.length < LENGTH_BYTES) this.#tail = [Buffer.concat(this.#tail)];
      const frame = PREFIX_BYTES + this.#tail[0]!.readUInt32BE(0);
      if (this.#have < frame) return;
      const rest = Buffer.concat(this.#tail).subarray(frame);
      this.#tail = rest.length > 0 ? [rest] : [];
      this.#have = rest.length;
    }
  }

  /** What has come of a frame that has not ended. */
  get partial(): Buffer {
    return Buffer.concat(this.#tail);
  }

  /** Bytes that have come, those of a saved machine's half frame included. */
  get heard(): number {
    return this.#heard;
  }

  override _read(): void {
    this.#socket.resume();
  }

  override _write(chunk: Buffer, _: BufferEncoding, done: (error?: Error | null) => void): void {
    if (this.#holding) this.#held.push({ chunk, done });
    else this.#socket.write(chunk, done);
  }

  override _destroy(error: Error | null, done: (error?: Error | null) => void): void {
    this.#socket.destroy();
    for (const { done: each } of this.#held.splice(0)) each(error);
    done(error);
  }

  /** Keeps back whatever is written from now on, until `release`. */
  hold(): void {
    this.#holding = true;
  }

  release(): void {
    this.#holding = false;
    for (const { chunk, done } of this.#held.splice(0)) this.#socket.write(chunk, done);
  }

  /** With the machine stopped: waits until all that it had sent is here. */
  async settle(): Promise<void> {
    this.#socket.resume();
    for (let silent = 0; silent < 2; ) {
      const before = this.#heard;
      await new Promise((resolve) => setImmediate(resolve));
      silent = this.#heard === before ? silent + 1 : 0;
    }
  }
}
