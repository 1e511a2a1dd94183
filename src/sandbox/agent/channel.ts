import type { Duplex } from 'node:stream';

/** A frame of the agent: see agent.py. `body` holds the raw bytes after the JSON header. */
export interface Frame {
  header: Record<string, unknown>;
  body: Buffer;
}

const PREFIX_BYTES = 8;
/** More than any answer: two kept streams or one file. A longer frame means that the agent is not ours. */
const MAX_FRAME_BYTES = 512 * 1024 * 1024;

/** What a process prints and how it ends, told by the agent without being asked. */
export type TagListener = (frame: Frame) => void;

/** Frames to and from the agent inside. Requests are matched to their answers by id. */
export class AgentChannel {
  readonly #stream: Duplex;
  readonly #waiting = new Map<
    number,
    { resolve(frame: Frame): void; reject(error: Error): void }
  >();
  readonly #tags = new Map<number, TagListener>();
  readonly #onEnd: (error: Error) => void;
  readonly hello: Promise<void>;
  #hear!: () => void;
  #deaf!: (error: Error) => void;
  #chunks: Buffer[] = [];
  #buffered = 0;
  #needed = PREFIX_BYTES;
  #closed: Error | null = null;
  #nextId = 1;

  /** `onEnd` is called once, when no answer can come any more. */
  constructor(stream: Duplex, onEnd: (error: Error) => void = () => {}) {
    this.#stream = stream;
    this.#onEnd = onEnd;
    this.hello = new Promise((resolve, reject) => {
      this.#hear = resolve;
      this.#deaf = reject;
    });
    this.hello.catch(() => {});
    stream.on('data', (chunk: Buffer) => this.#receive(chunk));
    stream.on('error', (error) => this.#end(error));
    stream.on('close', () => this.#end(new Error('the agent closed its end')));
    stream.on('end', () => this.#end(new Error('the agent closed its end')));
  }

  get closed(): boolean {
    return this.#closed !== null;
  }

  #end(error: Error): void {
    if (this.#closed) return;
    this.#closed = error;
    this.#deaf(error);
    for (const waiting of this.#waiting.values()) waiting.reject(error);
    this.#waiting.clear();
    this.#onEnd(error);
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
        this.#malformed();
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
      try {
        this.#take({ header: JSON.parse(header.toString()), body });
      } catch {
        this.#malformed();
        return;
      }
    }
  }

  #malformed(): void {
    this.#end(new Error('the agent sent a malformed frame'));
    this.#stream.destroy();
  }

  #take(frame: Frame): void {
    const { header } = frame;
    if (header.hello !== undefined) {
      this.#hear();
      return;
    }
    if (header.fault !== undefined) {
      this.#end(new Error(String(header.fault)));
      return;
    }
    if (header.tag !== undefined) {
      const listener = this.#tags.get(header.tag as number);
      if (header.exit !== undefined) this.#tags.delete(header.tag as number);
      listener?.(frame);
      return;
    }
    const waiting = this.#waiting.get(header.id as number);
    this.#waiting.delete(header.id as number);
    waiting?.resolve(frame);
  }

  /** A number for `call`, where the caller must know it before the answer. */
  reserve(): number {
    return this.#nextId++;
  }

  /** Hears of a process started with this tag, until it ends. */
  listen(tag: number, listener: TagListener): void {
    this.#tags.set(tag, listener);
  }

  unlisten(tag: number): void {
    this.#tags.delete(tag);
  }

  /** Sends a request and waits for its answer; rejects when the connection ends first. */
  call(
    header: Record<string, unknown>,
    parts: readonly Uint8Array[] = [],
    id = this.reserve(),
  ): Promise<Frame> {
    return new Promise((resolve, reject) => {
      if (this.#closed) return reject(this.#closed);
      this.#waiting.set(id, { resolve, reject });
      const text = Buffer.from(JSON.stringify({ ...header, id }));
      const body = parts.reduce((sum, part) => sum + part.length, 0);
      const prefix = Buffer.alloc(PREFIX_BYTES);
      prefix.writeUInt32BE(text.length + body, 0);
      prefix.writeUInt32BE(text.length, 4);
      if (body < 65536) this.#stream.write(Buffer.concat([prefix, text, ...parts]));
      else for (const part of [prefix, text, ...parts]) this.#stream.write(part);
    });
  }

  /** Holds back everything that the agent says: it then waits in turn. */
  pause(): void {
    this.#stream.pause();
  }

  resume(): void {
    this.#stream.resume();
  }

  destroy(): void {
    this.#stream.destroy();
  }
}

/** Cuts a frame's body into the parts its header names. */
export function frameParts(frame: Frame): Buffer[] {
  let position = 0;
  return (frame.header.lengths as number[]).map((length) =>
    frame.body.subarray(position, (position += length)),
  );
}
