import { type CodeRequest, type ExecResult, LonghaulError } from '../../core/index.ts';
import type { Channel, Lane, Lockstep } from '../../model/lockstep.ts';
import {
  DEFAULT_SPEC,
  type Sandbox,
  type SandboxDriver,
  type SandboxSpec,
} from '../../sandbox/contract.ts';

/**
 * A few sandboxes shared by all rollouts of a batch, for environments whose workspace does not matter:
 * every program runs in a process of its own, and the programs of one try of all rollouts travel in one
 * round trip a sandbox. Rollouts of one task often say the same: equal requests run once. Rollouts share
 * the files of such a sandbox, so it is no place for tasks that keep secrets in files.
 */
export class SharedSandboxes {
  readonly #driver: Pick<SandboxDriver, 'create'>;
  readonly #spec: Partial<SandboxSpec>;
  readonly #channel: Channel<CodeRequest, ExecResult>;
  /** A broken one is replaced at the next batch. */
  readonly #sandboxes: (Sandbox | null)[];

  /** @param count sandboxes that work at the same time */
  constructor(
    driver: Pick<SandboxDriver, 'create'>,
    spec: Partial<SandboxSpec>,
    lockstep: Lockstep,
    count: number,
  ) {
    this.#driver = driver;
    this.#spec = spec;
    this.#sandboxes = new Array<Sandbox | null>(count).fill(null);
    this.#channel = lockstep.channel((requests: CodeRequest[]) => this.#run(requests));
  }

  /** The driver that one rollout sees: its sandboxes only run code, and ending one ends nothing. */
  forLane(lane: Lane): Pick<SandboxDriver, 'create'> {
    return { create: async () => this.#view(lane) };
  }

  async close(): Promise<void> {
    await Promise.all(this.#sandboxes.map((_, slot) => this.#drop(slot)));
  }

  async #run(requests: CodeRequest[]): Promise<ExecResult[]> {
    const keys = requests.map((request) => JSON.stringify(request));
    const different = [...new Map(requests.map((request, i) => [keys[i]!, request]))];
    const results = new Map<string, ExecResult>();
    await Promise.all(
      this.#sandboxes.map(async (_, slot) => {
        const share = different.filter((_, i) => i % this.#sandboxes.length === slot);
        if (share.length === 0) return;
        const outputs = await this.#runIn(
          slot,
          share.map(([, request]) => request),
        );
        for (const [i, [key]] of share.entries()) results.set(key, outputs[i]!);
      }),
    );
    return keys.map((key) => results.get(key)!);
  }

  async #runIn(slot: number, requests: CodeRequest[]): Promise<ExecResult[]> {
    try {
      const sandbox = (this.#sandboxes[slot] ??= await this.#driver.create(this.#spec));
      return await sandbox.runCode(requests);
    } catch (error) {
      await this.#drop(slot).catch(() => {});
      throw error;
    }
  }

  async #drop(slot: number): Promise<void> {
    const sandbox = this.#sandboxes[slot];
    this.#sandboxes[slot] = null;
    await sandbox?.stop();
  }

  #view(lane: Lane): Sandbox {
    const refuse = async (): Promise<never> => {
      throw new LonghaulError('CapabilityMissing', 'a shared sandbox only runs code');
    };
    return {
      id: 'shared',
      spec: { ...DEFAULT_SPEC, ...this.#spec },
      runCode: async (requests) => {
        const results: ExecResult[] = [];
        for (const request of requests) results.push(await lane.call(this.#channel, request));
        return results;
      },
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
}
