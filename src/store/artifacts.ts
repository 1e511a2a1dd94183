import { createHash, randomBytes } from 'node:crypto';
import { open, readFile, rename, rm, stat } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import {
  type ArtifactRef,
  type ArtifactStore,
  LonghaulError,
  type Redactor,
} from '../core/index.ts';
import { codeOf, fileError } from './failures.ts';
import { makeFolder, syncFolder } from './folders.ts';

/**
 * Bytes by hash in a folder: `ab/cdef…` for the SHA-256 abcdef…. A file appears whole or not at all,
 * survives a power failure once `put` returned, and is checked against its name on every read.
 */
export class FolderArtifacts implements ArtifactStore {
  readonly #folder: string;
  readonly #redactor: Redactor;

  constructor(folder: string, redactor: Redactor) {
    this.#folder = folder;
    this.#redactor = redactor;
  }

  /**
   * Stores bytes and returns their hash and length. Text is redacted first, like the log: the hash is
   * then that of the redacted text. `StoreReadOnly` or `DiskFull` as the file system says.
   */
  async put(bytes: Uint8Array): Promise<ArtifactRef> {
    const clean = redacted(bytes, this.#redactor);
    const sha256 = createHash('sha256').update(clean).digest('hex');
    const ref = { sha256, bytes: clean.byteLength };
    const path = this.#path(sha256);
    try {
      const known = await stat(path).catch(() => null);
      if (known?.size === clean.byteLength) return ref;
      await makeFolder(dirname(path));
      const draft = `${path}.${process.pid}-${randomBytes(6).toString('hex')}.tmp`;
      try {
        const file = await open(draft, 'wx', 0o600);
        try {
          await file.writeFile(clean);
          await file.sync();
        } finally {
          await file.close();
        }
        await rename(draft, path);
      } catch (thrown) {
        await rm(draft, { force: true });
        throw thrown;
      }
      await syncFolder(dirname(path));
      await syncFolder(this.#folder);
    } catch (thrown) {
      throw fileError(thrown, path);
    }
    return ref;
  }

  async get(sha256: string): Promise<Uint8Array> {
    const path = this.#path(sha256);
    let bytes: Buffer;
    try {
      bytes = await readFile(path);
    } catch (thrown) {
      if (codeOf(thrown) === 'ENOENT')
        throw new LonghaulError('NotFound', `there is no artifact ${sha256}`, {
          next: 'Check that the home folder is the one the run was written to.',
        });
      throw fileError(thrown, path);
    }
    if (createHash('sha256').update(bytes).digest('hex') !== sha256)
      throw new LonghaulError('Internal', `the artifact ${sha256} is damaged`, {
        next: `Restore ${path} from a copy; the disk may be failing.`,
      });
    return bytes;
  }

  #path(sha256: string): string {
    if (!/^[0-9a-f]{64}$/.test(sha256))
      throw new LonghaulError('NotFound', `${JSON.stringify(sha256)} is not a SHA-256 hash`, {
        next: 'Take the hash from an event of the log.',
      });
    return join(this.#folder, sha256.slice(0, 2), sha256.slice(2));
  }
}

/** Text without secrets; anything that is not UTF-8 text (tokens, weights, archives) is left as it is. */
function redacted(bytes: Uint8Array, redactor: Redactor): Uint8Array {
  if (bytes.includes(0)) return bytes;
  let text: string;
  try {
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return bytes;
  }
  const clean = redactor.text(text);
  return clean === text ? bytes : Buffer.from(clean);
}
