import { zstdDecompressSync } from 'node:zlib';
import { parentPort } from 'node:worker_threads';
import { KeptOutput } from '../output.ts';
import { FileFault, FixedFiles, MemoryFiles, type MemoryNode, WORKSPACE } from './files.ts';
import {
  type Answer,
  type ProcessUsage,
  type Request,
  readNodes,
  type Snippet,
  type SnippetResult,
  wireFiles,
} from './protocol.ts';
import { Python, pythonFolder } from './python.ts';
import { messageOf, QuickJs } from './quickjs.ts';
import { ArchiveFault, unpackTar, withParents } from './tar.ts';

/**
 * The thread that runs the interpreters: the thread beside it ends it when a snippet is past its
 * deadline, wherever it is. It keeps a copy of the sandbox's files; the driver has the true ones.
 */

/** Compressed archives are unpacked to no more than this many times the disk limit, headers included. */
const ARCHIVE_OVERHEAD = 2;
const ARCHIVE_MARGIN_BYTES = 64 * 1024 * 1024;

/** QuickJS ends its own snippets at the deadline; one that does not is ended from beside. */
const JAVASCRIPT_GRACE_MS = 100;

/**
 * To the thread beside: that a snippet begins, what it printed first (in case it must be ended), or an
 * answer for the driver.
 */
export type WorkerMessage =
  | { running: { timeoutMs: number } }
  | { printed: Uint8Array; stream: 1 | 2 }
  | { answer: Answer; body: Uint8Array[] };

const port = parentPort!;
const quickjs = new QuickJs();
let python: Python | null = null;
let files: MemoryFiles | null = null;

const tell = (message: WorkerMessage) => port.postMessage(message);

function usage(): ProcessUsage {
  const { user, system } = process.cpuUsage();
  return {
    cpuMs: (user + system) / 1000,
    heldBytes: process.memoryUsage.rss(),
    peakBytes: process.resourceUsage().maxRSS * 1024,
  };
}

function openPython(memoryBytes: number): Python {
  const folder = pythonFolder();
  if (folder === null) throw new Error('the package with CPython is not installed');
  python ??= new Python(folder, memoryBytes);
  return python;
}

async function runSnippet(
  snippet: Snippet,
  memoryBytes: number,
  keepBytes: number,
  keep: (stream: 1 | 2, chunk: Buffer) => void,
): Promise<Omit<SnippetResult, 'totals'>> {
  if (snippet.language === 'javascript') {
    tell({ running: { timeoutMs: snippet.timeoutMs + JAVASCRIPT_GRACE_MS } });
    return quickjs.run(snippet, memoryBytes, files!, keep);
  }
  let started = performance.now();
  const onRunning = () => {
    tell({ running: { timeoutMs: snippet.timeoutMs } });
    started = performance.now();
  };
  const told = { 1: 0, 2: 0 };
  const output = (stream: 1 | 2, chunk: Buffer) => {
    keep(stream, chunk);
    const first = chunk.subarray(0, Math.max(0, keepBytes / 2 - told[stream]));
    told[stream] += first.length;
    if (first.length > 0) tell({ printed: first, stream });
  };
  const { source, stdin } = snippet;
  const end = openPython(memoryBytes).run(files!, { source, stdin, output, onRunning });
  if (end.trap) output(2, Buffer.from(end.trap));
  return {
    cause: end.signal === null ? 'exited' : 'signalled',
    code: end.code,
    signal: end.signal,
    ms: performance.now() - started,
    memory: end.memory,
  };
}

async function run(request: Extract<Request, { kind: 'run' }>, body: Uint8Array): Promise<void> {
  const { snippets, memoryBytes, keepBytes, limits } = request;
  if (request.reset || !files) files = new MemoryFiles(limits);
  const library = snippets.some(({ language }) => language === 'python')
    ? openPython(memoryBytes).library.nodes
    : [];
  const secrets = request.secrets.map(([name, value]): [string, MemoryNode] => [
    `/run/secrets/${name}`,
    { kind: 'file', data: Buffer.from(value), mode: 0o400, modifiedMs: 0 },
  ]);
  files.fixed = new FixedFiles([...library, ...secrets]);
  files.apply(readNodes(request.files.put, body), request.files.removed);
  for (const snippet of snippets) {
    const outputs = [new KeptOutput(keepBytes), new KeptOutput(keepBytes)] as const;
    const raw = await runSnippet(snippet, memoryBytes, keepBytes, (stream, chunk) =>
      outputs[stream - 1]!.add(chunk),
    );
    const lost = raw.cause === 'timeout';
    if (lost) files = null;
    const changes = files?.takeChanges() ?? { put: [], removed: [] };
    const wired = wireFiles(changes.put, changes.removed);
    const [out, err] = [outputs[0].data(), outputs[1].data()];
    const kept = [out.head, out.tail, err.head, err.tail];
    tell({
      answer: {
        kind: 'ended',
        result: { ...raw, totals: [out.total, err.total] },
        output: kept.map((part) => part.length),
        files: wired.files,
        lost,
        usage: usage(),
      },
      body: [...kept, ...wired.contents],
    });
    if (lost) return;
  }
}

/** Unpacks a hostile archive: here, where it can do the least. */
function unpack({ limits }: Extract<Request, { kind: 'unpack' }>, body: Uint8Array): void {
  try {
    const maxOutputLength = limits.diskBytes * ARCHIVE_OVERHEAD + ARCHIVE_MARGIN_BYTES;
    const tar = zstdDecompressSync(body, { maxOutputLength });
    const nodes = withParents(unpackTar(tar, { prefix: `${WORKSPACE}/` }), WORKSPACE);
    const wired = wireFiles(MemoryFiles.of(nodes, limits).workspace(), []);
    tell({ answer: { kind: 'unpacked', files: wired.files }, body: wired.contents });
  } catch (error) {
    const guest = error instanceof ArchiveFault || error instanceof FileFault;
    const code = (error as { code?: unknown }).code;
    const broken = typeof code === 'string' && /^(ZSTD_|ERR_BUFFER_TOO_LARGE)/.test(code);
    if (!guest && !broken) throw error;
    tell({ answer: { kind: 'refused', message: messageOf(error) }, body: [] });
  }
}

port.on('message', async ({ header, body }: { header: Request; body: Uint8Array }) => {
  try {
    if (header.kind === 'run') await run(header, body);
    else unpack(header, body);
  } catch (error) {
    files = null;
    tell({ answer: { kind: 'failed', message: messageOf(error) }, body: [] });
  }
});
await quickjs.load();
tell({ answer: { kind: 'ready' }, body: [] });
