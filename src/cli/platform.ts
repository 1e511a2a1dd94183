import { availableParallelism, hostname } from 'node:os';
import { join } from 'node:path';
import { LonghaulError, Redactor } from '../core/index.ts';
import type { Engine } from '../engine/contract.ts';
import { createEmbeddedEngine } from '../engine/embedded/index.ts';
import type { SandboxDriver, SandboxDriverName } from '../sandbox/contract.ts';
import {
  BubblewrapDriver,
  ImageStore,
  machineOf,
  type OpenedSandboxes,
  openSandboxes,
} from '../sandbox/index.ts';
import { openStore, type Store } from '../store/index.ts';
import { openHome, secretsOf } from './home.ts';
import { collectLayers } from './layer-garbage.ts';
import type { Output } from './output.ts';

/** Threads that a model of a few million parameters can use. */
const MOST_THREADS = 4;

/** The concrete parts behind one command, opened when first asked for and closed together. */
export class Platform {
  readonly home: string;
  readonly output: Output;
  readonly redactor = new Redactor(secretsOf(process.env));
  readonly worker = `${hostname()}:${process.pid}`;
  /** Why bubblewrap is not used and what to do, once `sandboxes` has answered. */
  sandboxShortfall: { reason: string; next: string } | null = null;
  readonly #homeGiven: string;
  readonly #driver: SandboxDriverName | undefined;
  readonly #closers: (() => Promise<void>)[] = [];
  readonly #remembered = new Map<string, Promise<unknown>>();
  #store: Promise<Store> | null = null;
  #engine: Engine | null = null;
  #sandboxes: Promise<SandboxDriver> | null = null;
  #collecting = false;

  /** `driver`: the sandbox driver to use or fail. */
  constructor(home: string, output: Output, driver?: SandboxDriverName) {
    this.#driver = driver;
    this.#homeGiven = home;
    this.home = openHome(home);
    this.output = output;
  }

  store(): Promise<Store> {
    this.#store ??= this.#open(
      openStore({
        home: this.home,
        redactor: this.redactor,
        ...(process.env.DATABASE_URL ? { databaseUrl: process.env.DATABASE_URL } : {}),
      }),
    );
    this.#collectLayers();
    return this.#store;
  }

  /** A driver of its own for the caller to close. `warm`: sandboxes kept ready. */
  async openSandboxes(warm?: number): Promise<OpenedSandboxes> {
    const machine = machineOf(process.env);
    return openSandboxes({
      dir: join(this.home, 'sandbox'),
      ...(machine && { machine }),
      ...(warm !== undefined && { warm }),
      ...(this.#driver !== undefined && { prefer: this.#driver }),
    });
  }

  sandboxes(): Promise<SandboxDriver> {
    this.#sandboxes ??= (async () => {
      const opened = await this.openSandboxes();
      const { driver, saidAloud } = opened;
      this.sandboxShortfall =
        opened.reason === null ? null : { reason: opened.reason, next: opened.next ?? '' };
      this.#closers.push(() => driver.close());
      this.output.say(saidAloud);
      return driver;
    })();
    this.#collectLayers();
    return this.#sandboxes;
  }

  /** The images of this home. `CapabilityMissing` where no driver can hold them, with what the machine lacks. */
  async images(): Promise<ImageStore> {
    return imagesOf(await this.sandboxes(), this.sandboxShortfall);
  }

  /** Once store and sandboxes are both in use: in the background, and over before either closes. */
  #collectLayers(): void {
    if (this.#collecting || !this.#store || !this.#sandboxes) return;
    this.#collecting = true;
    Promise.all([this.#store, this.#sandboxes]).then(
      ([store, driver]) => {
        const work = collectLayers({
          dir: join(this.home, 'sandbox'),
          databaseUrl: process.env.DATABASE_URL,
          names: store.log,
          driver,
        }).then(
          (reason) => reason && this.output.say(reason),
          (error) => this.output.say(`workspace layers were not collected: ${error.message}`),
        );
        this.#closers.push(async () => void (await work));
      },
      () => {}, // whoever asked for it is told
    );
  }

  /** A command to print as a hint: as it works from where the user is, with the home they gave. */
  hint(command: string): string {
    const inCheckout = import.meta.url.endsWith('.ts');
    const program = inCheckout ? 'npm run -s longhaul --' : 'npx longhaul';
    return `${program} ${command}${this.#homeGiven === '.longhaul' ? '' : ` --home ${this.#homeGiven}`}`;
  }

  /** Whether a run's worker is certainly gone: only the embedded store's workers are all on this machine. */
  isDead(worker: string): boolean {
    return !process.env.DATABASE_URL && this.isGone(worker);
  }

  /** Whether a process of this machine, written `HOST:PID`, no longer exists. */
  isGone(worker: string): boolean {
    const [machine, pid] = worker.split(':');
    if (machine !== hostname()) return false;
    try {
      process.kill(Number(pid), 0);
      return false;
    } catch (error) {
      return (error as NodeJS.ErrnoException).code === 'ESRCH';
    }
  }

  /**
   * Trainer and sampler take turns, so each may use every core, up to where small models stop gaining.
   * Samplers of one thread each give equal seeds equal tokens, whatever else is in their batch.
   */
  engine(): Engine {
    if (this.#engine === null) {
      const cores = Math.min(MOST_THREADS, availableParallelism());
      const engine = createEmbeddedEngine({
        trainerThreads: cores,
        samplerThreads: 1,
        samplerReplicas: cores,
      });
      this.#closers.push(() => engine.close());
      this.#engine = engine;
    }
    return this.#engine;
  }

  /** What a command needs several times and makes once; a failure is not kept. */
  remember<T>(key: string, make: () => Promise<T>): Promise<T> {
    let made = this.#remembered.get(key) as Promise<T> | undefined;
    if (made === undefined) {
      made = make();
      this.#remembered.set(key, made);
      made.catch(() => this.#remembered.delete(key));
    }
    return made;
  }

  /** Closed with the platform, last opened first. */
  closeLater(close: () => Promise<void>): void {
    this.#closers.push(close);
  }

  async close(): Promise<void> {
    for (const close of this.#closers.reverse()) await close();
  }

  async #open<T extends { close(): Promise<void> }>(opening: Promise<T>): Promise<T> {
    const opened = await opening;
    this.#closers.push(() => opened.close());
    return opened;
  }
}

/** The image store beside a driver's layers. `CapabilityMissing` for drivers that hold no images. */
export function imagesOf(
  driver: SandboxDriver,
  shortfall: { reason: string | null; next: string | null } | null,
): ImageStore {
  if (driver instanceof BubblewrapDriver) return new ImageStore({ driver });
  const why = shortfall?.reason ?? `${driver.name} was asked for`;
  throw new LonghaulError(
    'CapabilityMissing',
    `images are built and run in bubblewrap sandboxes, and this is ${driver.name}: ${why}`,
    { next: shortfall?.next || 'Leave --sandbox out.' },
  );
}

/** A run id from what a person typed: whole, an unambiguous beginning or end, or `last`. */
export async function resolveRunId(store: Store, text: string): Promise<string> {
  if (text === 'last') {
    const [latest] = await store.log.list({ limit: 1 });
    if (latest === undefined) throw new LonghaulError('NotFound', 'there are no runs yet');
    return latest.runId;
  }
  const found = await store.log.find(text.toUpperCase());
  const [only, another] = found;
  if (only === undefined) throw new LonghaulError('NotFound', `there is no run ${text}`);
  if (another !== undefined) {
    throw new LonghaulError('ConfigInvalid', `${text} could be any of ${found.join(', ')}`, {
      next: 'Give more of the id.',
    });
  }
  return only;
}
