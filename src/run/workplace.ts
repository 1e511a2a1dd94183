import { LonghaulError, type NewEvent } from '../core/index.ts';
import type { Sandbox } from '../sandbox/contract.ts';
import type { RunContext } from './context.ts';

/** The sandbox of a run, opened again from the last saved workspace whenever it must be. */
export class Workplace {
  readonly #context: RunContext;
  #sandbox: Sandbox | null = null;

  constructor(context: RunContext) {
    this.#context = context;
  }

  get sandbox(): Sandbox {
    if (this.#sandbox === null) throw new LonghaulError('SandboxBroken', 'the sandbox is not open');
    return this.#sandbox;
  }

  async open(): Promise<void> {
    const { session, sandboxes, journal } = this.#context;
    const layer = journal.state.workspace?.layer;
    this.#sandbox = await sandboxes.create(session.sandbox, layer);
    if (layer === undefined) await session.prepare(this.#sandbox);
  }

  async reopen(): Promise<void> {
    await this.close();
    await this.open();
  }

  /** The event that names the saved workspace, or none where workspaces are not kept. */
  async save(afterCallId: string | null): Promise<NewEvent[]> {
    if (!this.#context.saveWorkspace) return [];
    const layer = await this.sandbox.snapshot({ onBusy: 'stop', durable: true });
    return [{ type: 'workspace.saved', data: { layer, afterCallId } }];
  }

  async close(): Promise<void> {
    await this.#sandbox?.stop();
    this.#sandbox = null;
  }
}
