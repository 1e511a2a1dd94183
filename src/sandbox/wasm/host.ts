import { Worker } from 'node:worker_threads';
import type { WorkerMessage } from './engine-worker.ts';
import { type Answer, type Frame, FrameReader, frame, type Request } from './protocol.ts';

/**
 * The process of one sandbox: started with an empty environment and Node's permission model. This
 * thread passes frames between the driver and the thread that runs the interpreters, and ends that
 * thread when a snippet is past its deadline or its heap is full.
 */

/** JavaScript's own heap there; snippets live in WebAssembly memory, which their limit bounds. */
const HEAP_MB = 256;
/** For deep recursion in an interpreter, which uses the host's stack. */
const STACK_MB = 16;

const [, , maxBody = '0'] = process.argv;
const reader = new FrameReader(Number(maxBody));
let engine: Worker;
let timer: NodeJS.Timeout | undefined;
let startedAt = 0;
/** What the snippet printed first, of each stream. */
let printed: Record<1 | 2, Uint8Array[]> = { 1: [], 2: [] };
let ready = false;

function send(answer: Answer, body: readonly Uint8Array[] = []): void {
  for (const part of frame(answer, body)) process.stdout.write(part);
}

/** The thread is gone, and its files with it: the snippet ended so. */
function lost(cause: 'timeout' | 'out_of_memory'): void {
  const { user, system } = process.cpuUsage();
  const ms = performance.now() - startedAt;
  const memory = cause === 'out_of_memory';
  const [out, err] = [Buffer.concat(printed[1]), Buffer.concat(printed[2])];
  const totals: [number, number] = [out.length, err.length];
  send(
    {
      kind: 'ended',
      result: { cause, code: null, signal: 'SIGKILL', totals, ms, memory },
      output: [out.length, 0, err.length, 0],
      files: { put: [], removed: [] },
      lost: true,
      usage: {
        cpuMs: (user + system) / 1000,
        heldBytes: process.memoryUsage.rss(),
        peakBytes: process.resourceUsage().maxRSS * 1024,
      },
    },
    [out, err],
  );
}

async function replace(cause: 'timeout' | 'out_of_memory'): Promise<void> {
  clearTimeout(timer);
  const old = engine;
  old.removeAllListeners();
  old.on('error', () => {});
  await old.terminate();
  start();
  lost(cause);
}

function start(): void {
  const file = import.meta.url.endsWith('.ts') ? './engine-worker.ts' : './engine-worker.js';
  engine = new Worker(new URL(file, import.meta.url), {
    env: {},
    resourceLimits: { maxOldGenerationSizeMb: HEAP_MB, stackSizeMb: STACK_MB },
  });
  engine.on('message', (message: WorkerMessage) => {
    if ('printed' in message) {
      printed[message.stream].push(message.printed);
      return;
    }
    clearTimeout(timer);
    printed = { 1: [], 2: [] };
    if ('running' in message) {
      startedAt = performance.now();
      timer = setTimeout(() => void replace('timeout'), message.running.timeoutMs);
    } else if (message.answer.kind !== 'ready') send(message.answer, message.body);
    else if (!ready) {
      ready = true;
      send(message.answer);
    }
  });
  engine.on('error', (error: NodeJS.ErrnoException) => {
    if (error.code === 'ERR_WORKER_OUT_OF_MEMORY') void replace('out_of_memory');
    else {
      process.stderr.write(`${error.message}\n`);
      process.exit(1);
    }
  });
}

start();
process.stdin.on('data', (chunk: Buffer) => {
  for (const { header, body } of reader.add(chunk) as (Frame & { header: Request })[])
    engine.postMessage({ header, body });
});
// The driver is gone.
process.stdin.on('end', () => process.exit());
