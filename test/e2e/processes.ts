import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { stopEmbedded } from '../../src/store/index.ts';
import type { Scenario } from '../chat-server/server.ts';

const repository = join(import.meta.dirname, '..', '..');

/** A home folder, a scripted vendor in a process of its own, and the command line as people start it. */
export class Stage {
  readonly folder = mkdtempSync(join(tmpdir(), 'longhaul-e2e-'));
  readonly home = join(this.folder, 'home');
  readonly requestLog = join(this.folder, 'requests.jsonl');
  readonly #children = new Set<ChildProcess>();
  #scenario = join(this.folder, 'scenario.json');
  #server: ChildProcess | null = null;
  #port = 0;

  /** Starts the vendor, on the same port as before if it was started before. */
  async vendor(scenario?: Scenario): Promise<void> {
    if (scenario) writeFileSync(this.#scenario, JSON.stringify(scenario));
    const args = [
      '--scenario',
      this.#scenario,
      '--port',
      String(this.#port),
      '--log',
      this.requestLog,
    ];
    const child = this.#spawn([join(repository, 'test', 'chat-server', 'main.ts'), ...args]);
    const [line] = (await once(child.stdout!, 'data')) as [Buffer];
    this.#port = (JSON.parse(line.toString().split('\n')[0]!) as { port: number }).port;
    this.#server = child;
  }

  async killVendor(): Promise<void> {
    this.#server?.kill('SIGKILL');
    if (this.#server && this.#server.exitCode === null && this.#server.signalCode === null)
      await once(this.#server, 'exit');
  }

  get model(): string[] {
    return [
      '--model',
      'openai-compatible/scripted',
      '--base-url',
      `http://127.0.0.1:${this.#port}/v1`,
    ];
  }

  /** A command that is still running. */
  start(...args: string[]): ChildProcess {
    return this.#spawn([
      join(repository, 'bin', 'longhaul.js'),
      '--home',
      this.home,
      '--json',
      ...args,
    ]);
  }

  /** A command from start to end. `json` is its last document. */
  async run(
    ...args: string[]
  ): Promise<{ code: number | null; json: Record<string, never>; stderr: string }> {
    return finished(this.start(...args));
  }

  async close(): Promise<void> {
    for (const child of this.#children) {
      if (child.exitCode === null && child.signalCode === null) {
        child.kill('SIGKILL');
        await once(child, 'exit');
      }
    }
    await stopEmbedded(this.home);
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 10, retryDelay: 200 });
  }

  #spawn(args: string[]): ChildProcess {
    const env = { ...process.env, LONGHAUL_API_KEY: 'test-key-test-key', NO_COLOR: '1' };
    const child = spawn(process.execPath, args, { stdio: ['ignore', 'pipe', 'pipe'], env });
    this.#children.add(child);
    return child;
  }
}

export async function finished(
  child: ChildProcess,
): Promise<{ code: number | null; json: Record<string, never>; stderr: string }> {
  let stdout = '';
  let stderr = '';
  child.stdout!.on('data', (data) => {
    stdout += data;
  });
  child.stderr!.on('data', (data) => {
    stderr += data;
  });
  const [code] = (await once(child, 'close')) as [number | null];
  const last = stdout.trim().split('\n').at(-1) ?? '';
  return { code, json: last === '' ? {} : JSON.parse(last), stderr };
}

/** Resolves once the process has said something that matches. */
export function heard(child: ChildProcess, pattern: RegExp): Promise<string> {
  return new Promise((resolve, reject) => {
    let text = '';
    const listen = (data: Buffer) => {
      text += data;
      if (!pattern.test(text)) return;
      child.stderr!.off('data', listen);
      resolve(text);
    };
    child.stderr!.on('data', listen);
    child.once('exit', () => reject(new Error(`ended without saying ${pattern}: ${text}`)));
  });
}

export const task = (name: string) => join(repository, 'recipes', 'tasks', name);
