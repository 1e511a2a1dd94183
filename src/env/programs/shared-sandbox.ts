import { type CodeRequest, type ExecResult, LonghaulError } from '../../core/index.ts';
import type { Channel, Lane, Lockstep } from '../../model/lockstep.ts';
import type { Sandbox, SandboxDriver } from '../../sandbox/contract.ts';

/**
 * A few sandboxes shared by all rollouts of a batch, for environments whose workspace does not matter:
 * every program runs in a process of its own, and the programs of one attempt of all rollouts travel
 * in one round trip a sandbox. Rollouts share the files of such a sandbox, so it is no place for tasks
 * that keep secrets in files.
 */
export class SharedSandboxes {
  readonly #driver: Pick<SandboxDriver, 'create'>;
  readonly #spec: Parameters<SandboxDriver['create']>[0];
  readonly #slots: Slot[];

  constructor(
    driver: Pick<SandboxDriver, 'create'>,
    spec: Parameters<SandboxDriver['create']>[0],
    lockstep: Lockstep,
    count: number,
  ) {
    this.#driver = driver;
    this.#spec = spec;
    this.#slots = Array.from({ length: count }, () => new Slot(lockstep, () => this.#create()));
  }

  /** The driver that one rollout sees: its sandboxes are views of a shared one. */
  forLane(index: number, lane: Lane): Pick<SandboxDriver, 'create'> {
    const slot = this.#slots[index % this.#slots.length]!;
    return { create: async () => slot.view(lane) };
  }

  async close(): Promise<void> {
    await Promise.all(this.#slots.map((slot) => slot.close()));
  }

  #create(): Promise<Sandbox> {
    return this.#driver.create(this.#spec);
  }
}

/** One shared sandbox; a broken one is replaced at the next batch. */
class Slot {
  readonly #create: () => Promise<Sandbox>;
  readonly #channel: Channel<CodeRequest, ExecResult>;
  #sandbox: Sandbox | null = null;

  constructor(lockstep: Lockstep, create: () => Promise<Sandbox>) {
    this.#create = create;
    this.#channel = lockstep.channel((requests: CodeRequest[]) => this.#run(requests));
  }

  /** Only `runCode` with one request, and an end that ends nothing. */
  view(lane: Lane): Sandbox {
    const refuse = async (): Promise<never> => {
      throw new LonghaulError('CapabilityMissing', 'a shared sandbox only runs code');
    };
    return {
      id: 'shared',
      spec: this.#sandbox?.spec as Sandbox['spec'],
      runCode: (requests) =>
        Promise.all(requests.map((request) => lane.call(this.#channel, request))),
      stop: async () => {},
      exec: refuse,
      readFile: refuse,
      writeFile: refuse,
      listFiles: refuse,
      snapshot: refuse,
      rollback: refuse,
      fork: refuse,
      usage: refuse,
    };
  }

  async close(): Promise<void> {
    const sandbox = this.#sandbox;
    this.#sandbox = null;
    await sandbox?.stop();
  }

  async #run(requests: CodeRequest[]): Promise<ExecResult[]> {
    try {
      this.#sandbox ??= await this.#create();
      return await this.#sandbox.runCode(requests);
    } catch (error) {
      await this.close().catch(() => {});
      throw error;
    }
  }
}
