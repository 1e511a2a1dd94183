import type { Socket } from 'node:net';

/** A frame of the agent: see agent.py. `body` holds the raw bytes after the JSON header. */
export interface Frame {
  header: Record<string, unknown>;
  body: Buffer;
}

const PREFIX_BYTES = 8;
/** More than any answer: two kept streams or one file. A longer frame means that the agent is not ours. */
const MAX_FRAME_BYTES = 512 * 1024 * 1024;

/** Frames to and from the agent inside, one request at a time. */
export class AgentChannel {
  readonly #socket: Socket;
  #chunks: Buffer[] = [];
  #buffered = 0;
  #needed = PREFIX_BYTES;
  #waiting: { resolve(frame: Frame): void; reject(error: Error): void } | null = null;
  #closed: Error | null = null;

  constructor(socket: Socket) {
    this.#socket = socket;
    socket.on('data', (chunk: Buffer) => this.#receive(chunk));
    socket.on('error', (error) => this.#end(error));
    socket.on('close', () => this.#end(new Error('the agent closed its end')));
  }

  #end(error: Error): void {
    this.#closed ??= error;
    this.#waiting?.reject(this.#closed);
    this.#waiting = null;
  }

  #receive(chunk: Buffer): void {
    this.#chunks.push(chunk);
    this.#buffered += chunk.length;
    while (this.#buffered >= this.#needed) {
      const data = this.#chunks.length === 1 ? this.#chunks[0]! : Buffer.concat(this.#chunks);
      this.#chunks = [data];
      const total = data.readUInt32BE(0);
      const size = data.readUInt32BE(4);
      if (total > MAX_FRAME_BYTES || size > total) {
        this.#socket.destroy(new Error('the agent sent a malformed frame'));
        return;
      }
      this.#needed = PREFIX_BYTES + total;
      if (data.length < this.#needed) return;
      const header = data.subarray(PREFIX_BYTES, PREFIX_BYTES + size);
      const body = data.subarray(PREFIX_BYTES + size, this.#needed);
      const rest = data.subarray(this.#needed);
      this.#chunks = rest.length > 0 ? [rest] : [];
      this.#buffered = rest.length;
      this.#needed = PREFIX_BYTES;
      const waiting = this.#waiting;
      this.#waiting = null;
      try {
        waiting?.resolve({ header: JSON.parse(header.toString()), body });
      } catch (error) {
        waiting?.reject(error as Error);
      }
    }
  }

  /** The next frame; rejects when the connection ends first. */
  receive(): Promise<Frame> {
    return new Promise((resolve, reject) => {
      if (this.#closed) return reject(this.#closed);
      this.#waiting = { resolve, reject };
    });
  }

  /** Sends a request and waits for its answer. Callers queue: the agent has one conversation. */
  call(header: Record<string, unknown>, parts: readonly Uint8Array[] = []): Promise<Frame> {
    const answer = this.receive();
    const text = Buffer.from(JSON.stringify(header));
    const body = parts.reduce((sum, part) => sum + part.length, 0);
    const prefix = Buffer.alloc(PREFIX_BYTES);
    prefix.writeUInt32BE(text.length + body, 0);
    prefix.writeUInt32BE(text.length, 4);
    this.#socket.write(Buffer.concat([prefix, text, ...parts]));
    return answer;
  }

  destroy(): void {
    this.#socket.destroy();
  }
}

/** Cuts a frame's body into the parts its header names. */
export function frameParts(frame: Frame): Buffer[] {
  let position = 0;
  return (frame.header.lengths as number[]).map((length) =>
    frame.body.subarray(position, (position += length)),
  );
}
