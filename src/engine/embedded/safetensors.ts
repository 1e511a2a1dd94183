import { type FileHandle, open } from 'node:fs/promises';
import { attribute, LonghaulError } from '../../core/index.ts';

/**
 * The safetensors format: 8 bytes header length (little-endian), a JSON header, raw tensors. Only
 * float32, which is what this engine writes.
 */

/** A tensor and the flat array it lies in. */
export interface NamedTensor {
  name: string;
  shape: readonly number[];
  data: Float32Array;
}

/** No header of ours comes near it; a hostile one may not make us allocate. */
const MAX_HEADER_BYTES = 8 * 2 ** 20;

/** Writes tensors in order and syncs the file to disk. Metadata goes into `__metadata__`. */
export async function writeSafetensors(
  path: string,
  tensors: readonly NamedTensor[],
  metadata: Readonly<Record<string, string>>,
): Promise<void> {
  const header: Record<string, unknown> = { __metadata__: { format: 'pt', ...metadata } };
  let offset = 0;
  for (const { name, shape, data } of tensors) {
    const end = offset + data.byteLength;
    header[name] = { dtype: 'F32', shape, data_offsets: [offset, end] };
    offset = end;
  }
  const text = Buffer.from(JSON.stringify(header));
  const padded = Buffer.alloc(Math.ceil(text.length / 8) * 8, ' ');
  text.copy(padded);
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(padded.length));
  const file = await open(path, 'wx');
  try {
    await file.writeFile(size);
    await file.writeFile(padded);
    for (const { data } of tensors)
      await file.writeFile(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    await file.sync();
  } finally {
    await file.close();
  }
}

interface Entry {
  name: string;
  shape: number[];
  start: number;
  end: number;
}

/**
 * Reads a file into the given tensors: exactly these names and shapes must be there, their ranges must
 * tile the data without gap, overlap or surplus, and every value must be finite. Anything else is
 * `CheckpointInvalid`. The file makes us allocate nothing but its header, which is bounded. Returns the
 * metadata.
 */
export async function readSafetensors(
  path: string,
  expected: readonly NamedTensor[],
): Promise<Record<string, string>> {
  const refuse = (text: string): never => {
    throw new LonghaulError('CheckpointInvalid', `${path}: ${text}`);
  };
  let file: FileHandle;
  try {
    file = await open(path, 'r');
  } catch (error) {
    throw attribute(error, 'CheckpointInvalid', path);
  }
  try {
    const { size } = await file.stat();
    const prefix = Buffer.alloc(8);
    if (size < 8 || !(await readExactly(file, prefix, 0))) refuse('too short for safetensors');
    const headerBytes = Number(prefix.readBigUInt64LE());
    if (headerBytes > MAX_HEADER_BYTES || headerBytes > size - 8)
      refuse(`its header claims ${headerBytes} bytes`);
    const headerText = Buffer.alloc(headerBytes);
    if (!(await readExactly(file, headerText, 8))) refuse('its header is cut off');
    const { entries, metadata } = parseHeader(headerText, refuse);
    const dataStart = 8 + headerBytes;
    checkTiling(entries, size - dataStart, refuse);
    const byName = new Map(entries.map((entry) => [entry.name, entry]));
    if (byName.size !== expected.length)
      refuse(`it holds ${byName.size} tensors, the model has ${expected.length}`);
    for (const { name, shape, data } of expected) {
      const entry = byName.get(name) ?? refuse(`no tensor ${name}`);
      if (entry.shape.join() !== shape.join())
        refuse(`${name} has shape [${entry.shape.join()}], the model [${shape.join()}]`);
      const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
      if (!(await readExactly(file, bytes, dataStart + entry.start))) refuse(`${name} is cut off`);
      for (let i = 0; i < data.length; i++)
        if (!Number.isFinite(data[i])) refuse(`${name} holds a value that is not finite`);
    }
    return metadata;
  } finally {
    await file.close();
  }
}

async function readExactly(file: FileHandle, into: Buffer, position: number): Promise<boolean> {
  let filled = 0;
  while (filled < into.length) {
    const { bytesRead } = await file.read(into, filled, into.length - filled, position + filled);
    if (bytesRead === 0) return false;
    filled += bytesRead;
  }
  return true;
}

type Refuse = (text: string) => never;

function parseHeader(
  text: Buffer,
  refuse: Refuse,
): { entries: Entry[]; metadata: Record<string, string> } {
  let header: unknown;
  try {
    header = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(text));
  } catch {
    return refuse('its header is not JSON');
  }
  if (typeof header !== 'object' || header === null || Array.isArray(header))
    return refuse('its header is no JSON object');
  const metadata: Record<string, string> = {};
  const entries: Entry[] = [];
  for (const [name, value] of Object.entries(header)) {
    if (typeof value !== 'object' || value === null) return refuse(`${name} is no object`);
    if (name === '__metadata__') {
      for (const [key, item] of Object.entries(value))
        if (typeof item === 'string') metadata[key] = item;
      continue;
    }
    entries.push(parseEntry(name, value, refuse));
  }
  return { entries, metadata };
}

function parseEntry(name: string, value: object, refuse: Refuse): Entry {
  const { dtype, shape, data_offsets: offsets } = value as Record<string, unknown>;
  if (dtype !== 'F32') return refuse(`${name} has type ${String(dtype)}; only F32 is read`);
  if (!isSizes(shape)) return refuse(`${name} has no valid shape`);
  if (!isSizes(offsets) || offsets.length !== 2) return refuse(`${name} has no valid offsets`);
  const [start, end] = offsets as [number, number];
  const bytes = shape.reduce((a, b) => a * b, 4);
  if (end - start !== bytes) return refuse(`${name} has ${end - start} bytes, its shape ${bytes}`);
  return { name, shape, start, end };
}

function isSizes(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((x) => Number.isSafeInteger(x) && x >= 0);
}

function checkTiling(entries: readonly Entry[], bytes: number, refuse: Refuse): void {
  const ordered = entries.slice().sort((a, b) => a.start - b.start || a.end - b.end);
  let at = 0;
  for (const { name, start, end } of ordered) {
    if (start !== at) refuse(`${name} starts at ${start}, expected ${at}`);
    at = end;
  }
  if (at !== bytes) refuse(`it holds ${bytes} bytes of data, its header describes ${at}`);
}
