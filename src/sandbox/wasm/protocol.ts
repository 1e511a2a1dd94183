import type { CodeRequest, ExitCause } from '../../core/index.ts';
import { byteString, type MemoryLimits, type MemoryNode } from './files.ts';

/**
 * Frames between the driver and a sandbox's process: the lengths of header and body, a JSON header, and
 * the contents of files and output one after the other. The driver treats what it reads as hostile.
 */

const PREFIX_BYTES = 8;
const SMALL_BODY_BYTES = 64 * 1024;
const MAX_HEADER_BYTES = 64 * 1024 * 1024;
/** Longest body: output, and the files of a whole disk. */
export const MAX_BODY_BYTES = 2 ** 31 + 2 ** 24;

/** A file's name, and what it is; the contents of files lie in the body in the same order. */
export type WireNode = [path: string, kind: 'file' | 'directory' | 'symlink', ...more: unknown[]];

export interface WireFiles {
  put: WireNode[];
  removed: string[];
}

/** What the process is asked to do. The body holds the files' contents. */
export type Request =
  | {
      kind: 'run';
      limits: MemoryLimits;
      memoryBytes: number;
      keepBytes: number;
      /** Whether to say when a first snippet of JavaScript is about to run: files may take a while before it. */
      announce: boolean;
      /** Whether to forget all files first. */
      reset: boolean;
      files: WireFiles;
      /** The whole of /run/secrets. */
      secrets: [name: string, value: string][];
      snippets: Snippet[];
    }
  /** The body is an archive of a workspace. */
  | { kind: 'unpack'; limits: MemoryLimits }
  /** Makes the first run of Python a quick one. */
  | { kind: 'warm'; memoryBytes: number };

export type Snippet = Required<CodeRequest>;

export interface SnippetResult {
  cause: ExitCause;
  code: number | null;
  signal: string | null;
  totals: [stdout: number, stderr: number];
  ms: number;
  /** The guest ran into the limit on memory. */
  memory: boolean;
}

/** What the process says of itself; nothing depends on its being true. */
export interface ProcessUsage {
  cpuMs: number;
  heldBytes: number;
  peakBytes: number;
}

/**
 * Answers: `running`, any number of `printed` and `ended` for each snippet of a run, in order, until one
 * is `lost`; or one `unpacked`; `ready` at the start and to `warm`.
 */
export type Answer =
  | { kind: 'ready' }
  /** From now on the snippet's time counts. JavaScript that is not announced runs at once. */
  | { kind: 'running' }
  /** The body is the next of what the snippet printed first, in case it must be ended; `ended` has it too. */
  | { kind: 'printed'; stream: 1 | 2 }
  | {
      kind: 'ended';
      result: SnippetResult;
      /** Lengths of head and tail of standard output and error, which begin the body. */
      output: number[];
      files: WireFiles;
      /** The process knows no files any more: send them again. What the snippet wrote is discarded. */
      lost: boolean;
      usage: ProcessUsage;
    }
  /** The process cannot do it, by no fault of the guest. */
  | { kind: 'failed'; message: string }
  | { kind: 'unpacked'; files: WireFiles }
  /** The archive is not one, or does not fit. */
  | { kind: 'refused'; message: string };

export function wireFiles(
  put: readonly (readonly [path: string, node: MemoryNode])[],
  removed: readonly string[],
): { files: WireFiles; contents: Uint8Array[] } {
  const contents: Uint8Array[] = [];
  const wired = put.map(([path, node]): WireNode => {
    if (node.kind === 'directory') return [path, 'directory', node.mode, node.modifiedMs];
    if (node.kind === 'symlink') return [path, 'symlink', node.target, node.modifiedMs];
    if (node.kind === 'null') throw new Error('device nodes are not sent');
    contents.push(node.data);
    return [path, 'file', node.mode, node.modifiedMs, node.data.length];
  });
  return { files: { put: wired, removed: [...removed] }, contents };
}

const isCount = (value: unknown): value is number =>
  Number.isSafeInteger(value) && (value as number) >= 0;

/** Nodes of a frame, whose contents lie in `body` from `offset` on. Throws when they cannot be. */
export function readNodes(
  wired: readonly WireNode[],
  body: Uint8Array,
  offset = 0,
): [path: string, node: MemoryNode][] {
  let at = offset;
  const bad = () => new Error('malformed files in a frame');
  return wired.map(([path, kind, first, second, third]) => {
    if (typeof path !== 'string' || byteString(Buffer.from(path, 'latin1')) !== path) throw bad();
    if (typeof second !== 'number') throw bad();
    if (kind === 'symlink') {
      if (typeof first !== 'string') throw bad();
      return [path, { kind, target: first, modifiedMs: second }];
    }
    if (!isCount(first)) throw bad();
    const mode = first & 0o7777;
    if (kind === 'directory') return [path, { kind, mode, modifiedMs: second }];
    if (kind !== 'file' || !isCount(third) || at + third > body.length) throw bad();
    // A copy: a part would keep the whole frame in memory.
    const data = new Uint8Array(body.subarray(at, at + third));
    at += third;
    return [path, { kind, data, mode, modifiedMs: second }];
  });
}

export function frame(header: Request | Answer, body: readonly Uint8Array[] = []): Uint8Array[] {
  const text = Buffer.from(JSON.stringify(header));
  const prefix = Buffer.alloc(PREFIX_BYTES);
  const bodyBytes = body.reduce((sum, part) => sum + part.length, 0);
  prefix.writeUInt32BE(text.length, 0);
  prefix.writeUInt32BE(bodyBytes, 4);
  // One write for a small frame.
  if (bodyBytes <= SMALL_BODY_BYTES) return [Buffer.concat([prefix, text, ...body])];
  return [prefix, text, ...body];
}

export interface Frame {
  header: Request | Answer;
  body: Uint8Array;
}

/** Frames out of a stream of chunks. */
export class FrameReader {
  #chunks: Buffer[] = [];
  #held = 0;
  #lengths: [header: number, body: number] | null = null;
  /** Longest body that is believed. */
  maxBody: number;

  constructor(maxBody: number) {
    this.maxBody = maxBody;
  }

  #read(length: number): Buffer {
    if (this.#chunks[0] && this.#chunks[0].length >= length) {
      const first = this.#chunks[0];
      if (first.length === length) this.#chunks.shift();
      else this.#chunks[0] = first.subarray(length);
      this.#held -= length;
      return first.subarray(0, length);
    }
    const joined = Buffer.concat(this.#chunks);
    this.#chunks = joined.length > length ? [joined.subarray(length)] : [];
    this.#held -= length;
    return joined.subarray(0, length);
  }

  /** The frames that are now whole. Throws on what is none. */
  add(chunk: Buffer): Frame[] {
    this.#chunks.push(chunk);
    this.#held += chunk.length;
    const frames: Frame[] = [];
    for (;;) {
      if (!this.#lengths) {
        if (this.#held < PREFIX_BYTES) return frames;
        const prefix = this.#read(PREFIX_BYTES);
        this.#lengths = [prefix.readUInt32BE(0), prefix.readUInt32BE(4)];
        if (this.#lengths[0] > MAX_HEADER_BYTES || this.#lengths[1] > this.maxBody)
          throw new Error('a frame is too long');
      }
      const [header, body] = this.#lengths;
      if (this.#held < header + body) return frames;
      const text = this.#read(header).toString();
      frames.push({ header: JSON.parse(text), body: this.#read(body) });
      this.#lengths = null;
    }
  }
}
