import { constants as osConstants } from 'node:os';
import {
  type ExecRequest,
  type ExecResult,
  LonghaulError,
  type SandboxProcess,
} from '../../core/index.ts';
import { type AgentChannel, type Frame, frameParts } from './channel.ts';
import { type Evidence, execResult, type RawResult } from './requests.ts';

/** A process that goes on while other calls are made: see `ToolSandbox.start`. */
export class AgentProcess implements SandboxProcess {
  readonly id: number;
  readonly exited: Promise<ExecResult>;
  readonly #channel: AgentChannel;
  readonly #started = performance.now();
  #settle!: (result: ExecResult) => void;
  #fail!: (error: unknown) => void;

  /** `onExit` is called once, and says what the kernel counted meanwhile. */
  constructor(channel: AgentChannel, id: number, request: ExecRequest, onExit: () => Evidence) {
    this.id = id;
    this.#channel = channel;
    this.exited = new Promise((resolve, reject) => {
      this.#settle = resolve;
      this.#fail = reject;
    });
    this.exited.catch(() => {}); // nobody has to wait for it
    channel.listen(id, (frame) => {
      if (frame.header.exit !== undefined)
        this.#settle(execResult(frame.header.exit as RawResult, frameParts(frame), onExit()));
      else this.#tell(request, frame);
    });
    if (request.signal?.aborted) void this.kill();
    request.signal?.addEventListener('abort', () => void this.kill(), { once: true });
  }

  /** A listener that throws ends the process, and `exited` rejects with what it threw. */
  #tell(request: ExecRequest, frame: Frame): void {
    try {
      request.onOutput?.(frame.header.stream === 0 ? 'stdout' : 'stderr', frame.body);
    } catch (error) {
      this.#fail(error);
      void this.kill().catch(() => {});
    }
  }

  get ageMs(): number {
    return performance.now() - this.#started;
  }

  async #input(data: Uint8Array, end: boolean): Promise<void> {
    const frame = await this.#channel.call({ op: 'input', process: this.id, end }, [data]);
    this.#refused(frame);
  }

  #refused(frame: Frame): void {
    if (frame.header.errno === undefined) return;
    throw new LonghaulError('FileRefused', `process ${this.id}: ${frame.header.message}`, {
      next: 'Look at how it ended: `exited` holds what it printed.',
    });
  }

  async write(data: Uint8Array | string): Promise<void> {
    await this.#input(Buffer.from(data as Uint8Array), false);
  }

  async end(): Promise<void> {
    // A process that is gone has no standard input to close.
    await this.#input(new Uint8Array(), true).catch((error) => {
      if (!(error instanceof LonghaulError)) throw error;
    });
  }

  async kill(signal: Parameters<SandboxProcess['kill']>[0] = 'SIGKILL'): Promise<void> {
    if (this.#channel.closed) return;
    await this.#channel.call({
      op: 'kill',
      process: this.id,
      signal: osConstants.signals[signal],
    });
  }

  /** The agent that knew it is gone, and the process with it. */
  ended(result: ExecResult): void {
    this.#settle(result);
  }

  /** The sandbox is gone on the host's account, or was stopped. */
  lost(error: LonghaulError): void {
    this.#fail(error);
  }
}
