import { randomBytes } from 'node:crypto';
import { closeSync, mkdirSync, openSync, readdirSync, renameSync, rmSync, statSync } from 'node:fs';
import { connect, createServer, type Server } from 'node:net';
import { join } from 'node:path';

const LOCK = 'alive.sock';
const MAKING = 'new-';
const MAKING_MS = 600_000;

/**
 * The folder of one driver in one process. A socket in it answers as long as the process lives, whatever
 * process numbers mean where another one looks: who finds it dead may clean up.
 */
export class Owner {
  readonly name = randomBytes(8).toString('hex');
  readonly folder: string;
  readonly #lock: Server;

  private constructor(runs: string) {
    this.folder = join(runs, this.name);
    this.#lock = createServer((socket) => socket.destroy());
    this.#lock.unref();
  }

  static async claim(dir: string): Promise<Owner> {
    const runs = join(dir, 'run');
    mkdirSync(runs, { recursive: true, mode: 0o700 });
    const owner = new Owner(runs);
    // Nobody may find it without its lock.
    const making = join(runs, `${MAKING}${owner.name}`);
    mkdirSync(making, { mode: 0o700 });
    const fd = openSync(making, 'r');
    await new Promise<void>((resolve, reject) => {
      owner.#lock.once('error', reject);
      owner.#lock.listen(`/proc/self/fd/${fd}/${LOCK}`, resolve);
    });
    closeSync(fd);
    renameSync(making, owner.folder);
    return owner;
  }

  /**
   * Names of owners that are gone: what they left may be removed. Their machines ended with them, by the
   * kernel (see launcher.py).
   */
  static async dead(dir: string): Promise<string[]> {
    const runs = join(dir, 'run');
    const gone: string[] = [];
    for (const name of readdirSync(runs)) {
      const path = join(runs, name);
      const age = Date.now() - (statSync(path, { throwIfNoEntry: false })?.mtimeMs ?? Date.now());
      if (name.startsWith(MAKING) ? age < MAKING_MS : await answers(path)) continue;
      gone.push(name);
    }
    return gone;
  }

  static remove(dir: string, name: string): void {
    rmSync(join(dir, 'run', name), { recursive: true, force: true });
  }

  release(): void {
    this.#lock.close();
    rmSync(this.folder, { recursive: true, force: true });
  }
}

async function answers(folder: string): Promise<boolean> {
  let fd: number;
  try {
    fd = openSync(folder, 'r');
  } catch {
    return true; // another process has just removed it
  }
  const socket = connect(`/proc/self/fd/${fd}/${LOCK}`);
  const answer = await new Promise<boolean>((resolve) => {
    socket.once('connect', () => resolve(true));
    socket.once('error', () => resolve(false));
  });
  socket.destroy();
  closeSync(fd);
  return answer;
}
