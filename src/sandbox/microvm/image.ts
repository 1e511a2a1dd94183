import { type ChildProcess, spawn } from 'node:child_process';
import { join } from 'node:path';
import { Readable, Writable } from 'node:stream';
import { LonghaulError } from '../../core/index.ts';
import type { SavedMachine } from './layers.ts';
import type { Machine, MachineSize } from './machine.ts';

const LAUNCHER = join(import.meta.dirname, 'launcher.py');

/**
 * A machine that stands still, from which others start in milliseconds: its memory in a sealed memory
 * file, of which each maps a private copy, page by page as it writes, and the state of its devices.
 */
export class MemoryImage {
  readonly size: MachineSize;
  readonly path: string;
  readonly #holder: ChildProcess;
  #devices: Buffer = Buffer.alloc(0);
  saved!: SavedMachine;

  private constructor(holder: ChildProcess, size: MachineSize) {
    this.#holder = holder;
    this.size = size;
    this.path = `/proc/${holder.pid}/fd/3`;
  }

  /** An empty image: a machine is to run in it, with memory `kept`, and to be handed to `seal`. */
  static async make(python: string, size: MachineSize): Promise<MemoryImage> {
    const bytes = String(size.mebibytes * 2 ** 20);
    const holder = spawn(python, ['-IS', LAUNCHER, 'hold', bytes, String(process.pid)], {
      ...{ env: {}, cwd: '/', stdio: ['pipe', 'pipe', 'ignore'] },
    });
    holder.on('error', () => {});
    holder.stdin!.on('error', () => {});
    const image = new MemoryImage(holder, size);
    await image.#said('ready');
    return image;
  }

  #said(word: string): Promise<void> {
    return new Promise((resolve, reject) => {
      const fail = () =>
        reject(
          new LonghaulError('SandboxUnavailable', 'microvm: no memory file could be made', {
            next: 'It needs Linux and room for the memory of one machine.',
          }),
        );
      if (this.#holder.exitCode !== null || this.#holder.pid === undefined) return fail();
      this.#holder.once('close', fail);
      this.#holder.stdout!.once('data', (chunk) => {
        this.#holder.off('close', fail);
        if (String(chunk).trim() === word) resolve();
        else fail();
      });
    });
  }

  /** Takes the state of the machine, which stands still, ends it, and closes the memory to changes. */
  async seal(machine: Machine, saved: SavedMachine): Promise<void> {
    const chunks: Buffer[] = [];
    const sink = new Writable({
      write(chunk: Buffer, _, done) {
        chunks.push(chunk);
        done();
      },
    });
    await machine.save(sink, true);
    await machine.kill();
    this.#devices = Buffer.concat(chunks);
    this.saved = saved;
    const sealed = this.#said('sealed');
    this.#holder.stdin!.write('\n');
    await sealed;
  }

  devices(): Readable {
    return Readable.from([this.#devices]);
  }

  /** Machines that started from it go on: each has the memory mapped. */
  discard(): void {
    this.#holder.kill('SIGKILL');
  }
}
