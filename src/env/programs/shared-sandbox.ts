import { type CodeRequest, type ExecResult, LonghaulError } from '../../core/index.ts';
import type { Channel, Lane, Lockstep } from '../../model/lockstep.ts';
import {
  DEFAULT_SPEC,
  type Sandbox,
  type SandboxDriver,
  type SandboxSpec,
} from '../../sandbox/contract.ts';
import type { Case } from './cases.ts';
import { codeRequest, readResults } from './harness.ts';
import { verdict } from './verdict.ts';

const GOOD: readonly Case[] = [{ input: 'ab', expected: 'ab' }];

/** What a program gets that takes its sandbox down with it. */
const KILLED: ExecResult = {
  cause: 'signalled',
  code: null,
  signal: 'SIGKILL',
  stdout: '',
  stderr: '',
  stdoutBytes: 0,
  stderrBytes: 0,
  durationMs: 0,
};

/**
 * A few sandboxes shared by all rollouts of a batch, for environments whose workspace does not matter:
 * every program runs in a process of its own, and the programs of one try of all rollouts travel in one
 * round trip a sandbox. Rollouts of one task often say the same: equal requests run once. Rollouts share
 * the files of such a sandbox, so it is no place for tasks that keep secrets in files. A program that breaks
 * its sandbox is told from its neighbours by running them apart; it gets an invalid result, they get theirs.
 * Throws what the driver throws when the machine cannot run a good program either.
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

  /** A batch that breaks its sandbox is run again in parts, unless a good program fails as well. */
  async #runIn(slot: number, requests: CodeRequest[]): Promise<ExecResult[]> {
    try {
      return await this.#attempt(slot, requests);
    } catch (error) {
      if (!(await this.#works(slot, requests[0]!.language))) throw error;
      return this.#runParts(slot, requests);
    }
  }

  /**
   * Halves, down to the single program: its neighbours get their results from sandboxes that it has not
   * touched. One that breaks two sandboxes all by itself is killed, as if the kernel had done it.
   */
  async #runParts(slot: number, requests: CodeRequest[]): Promise<ExecResult[]> {
    if (requests.length === 1) {
      try {
        return await this.#attempt(slot, requests);
      } catch (error) {
        if (!(await this.#works(slot, requests[0]!.language))) throw error;
        return [KILLED];
      }
    }
    const middle = requests.length >> 1;
    const results: ExecResult[] = [];
    for (const half of [requests.slice(0, middle), requests.slice(middle)]) {
      try {
        results.push(...(await this.#attempt(slot, half)));
      } catch {
        // Whether the machine is at fault is asked again where one program is left.
        results.push(...(await this.#runParts(slot, half)));
      }
    }
    return results;
  }

  /** One round trip. A sandbox that fails it is not used again. */
  async #attempt(slot: number, requests: CodeRequest[]): Promise<ExecResult[]> {
    try {
      const sandbox = (this.#sandboxes[slot] ??= await this.#driver.create(this.#spec));
      return await sandbox.runCode(requests);
    } catch (error) {
      await this.#drop(slot).catch(() => {});
      throw error;
    }
  }

  /** Whether a fresh sandbox runs a good program: if not, the machine is at fault and no program. */
  async #works(slot: number, language: CodeRequest['language']): Promise<boolean> {
    try {
      const [result] = await this.#attempt(slot, [codeRequest(language, 'x', GOOD)]);
      return result !== undefined && verdict(GOOD, readResults(result)).kind === 'solved';
    } catch {
      return false;
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
      start: refuse,
      readFile: refuse,
      writeFile: refuse,
      listFiles: refuse,
      stat: refuse,
      pause: refuse,
      resume: refuse,
      putSecrets: refuse,
      networkAttempts: () => [],
      snapshot: refuse,
      rollback: refuse,
      fork: refuse,
      usage: refuse,
    };
  }
}
