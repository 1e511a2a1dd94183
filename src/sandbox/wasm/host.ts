import { zstdDecompressSync } from 'node:zlib';
import { KeptOutput } from '../output.ts';
import { FileFault, FixedFiles, MemoryFiles, type MemoryNode, WORKSPACE } from './files.ts';
import {
  type Answer,
  type Frame,
  FrameReader,
  frame,
  MAX_BODY_BYTES,
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
 * The process of one sandbox: started with an empty environment and Node's permission model, without
 * rights to files, processes and threads. (A right to threads would undo the others: a thread can be
 * started with other permissions.) So nothing here can end a snippet that does not end itself; the
 * driver does, by ending the process. It keeps a copy of the sandbox's files; the driver has the true ones.
 */

/** Archives are unpacked to no more than this many times the disk limit, headers included. */
const ARCHIVE_OVERHEAD = 2;
const ARCHIVE_MARGIN_BYTES = 64 * 1024 * 1024;

const quickjs = new QuickJs();
let python: { interpreter: Python; memoryBytes: number } | null = null;
let files: MemoryFiles | null = null;

/** What was sent is on its way when this returns, unless much is waiting (`flushed`). */
function send(answer: Answer, body: readonly Uint8Array[] = []): void {
  for (const part of frame(answer, body)) process.stdout.write(part);
}

/** So that a frame sent now goes at once, even if nothing else is ever done here. */
async function flushed(): Promise<void> {
  if (process.stdout.writableLength > 0)
    await new Promise<void>((resolve) => process.stdout.write('', () => resolve()));
}

function usage(): ProcessUsage {
  const { user, system } = process.cpuUsage();
  return {
    cpuMs: (user + system) / 1000,
    heldBytes: process.memoryUsage.rss(),
    peakBytes: process.resourceUsage().maxRSS * 1024,
  };
}

function openPython(memoryBytes: number): Python {
  if (python?.memoryBytes === memoryBytes) return python.interpreter;
  const folder = pythonFolder();
  if (folder === null) throw new Error('the package with CPython is not installed');
  python = { interpreter: new Python(folder, memoryBytes), memoryBytes };
  return python.interpreter;
}

type Output = (stream: 1 | 2, chunk: Buffer) => void;

async function runSnippet(
  snippet: Snippet,
  memoryBytes: number,
  keepBytes: number,
  keep: Output,
): Promise<Omit<SnippetResult, 'totals'>> {
  if (snippet.language === 'javascript') return quickjs.run(snippet, memoryBytes, files!, keep);
  let started = performance.now();
  const told = { 1: 0, 2: 0 };
  const output: Output = (stream, chunk) => {
    keep(stream, chunk);
    const first = chunk.subarray(0, Math.max(0, keepBytes / 2 - told[stream]));
    told[stream] += first.length;
    if (first.length > 0) send({ kind: 'printed', stream }, [first]);
  };
  const onRunning = () => {
    send({ kind: 'running' });
    started = performance.now();
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
  files.fixed = new FixedFiles(
    request.secrets.map(([name, value]): [string, MemoryNode] => [
      `/run/secrets/${name}`,
      { kind: 'file', data: Buffer.from(value), mode: 0o400, modifiedMs: 0 },
    ]),
  );
  files.apply(readNodes(request.files.put, body), request.files.removed);
  if (request.announce && snippets[0]?.language === 'javascript') send({ kind: 'running' });
  for (const snippet of snippets) {
    const outputs = [new KeptOutput(keepBytes), new KeptOutput(keepBytes)] as const;
    const raw = await runSnippet(snippet, memoryBytes, keepBytes, (stream, chunk) =>
      outputs[stream - 1]!.add(chunk),
    );
    // What a snippet that was cut off wrote does not count: as when the whole process is ended.
    const lost = raw.cause === 'timeout';
    if (lost) files = null;
    const changes = files?.takeChanges() ?? { put: [], removed: [] };
    const wired = wireFiles(changes.put, changes.removed);
    const [out, err] = [outputs[0].data(), outputs[1].data()];
    const kept = [out.head, out.tail, err.head, err.tail];
    send(
      {
        kind: 'ended',
        result: { ...raw, totals: [out.total, err.total] },
        output: kept.map((part) => part.length),
        files: wired.files,
        lost,
        usage: usage(),
      },
      [...kept, ...wired.contents],
    );
    await flushed();
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
    send({ kind: 'unpacked', files: wired.files }, wired.contents);
  } catch (error) {
    const guest = error instanceof ArchiveFault || error instanceof FileFault;
    const code = (error as { code?: unknown }).code;
    const broken = typeof code === 'string' && /^(Z_|ZSTD_|ERR_BUFFER_TOO_LARGE)/.test(code);
    if (!guest && !broken) throw error;
    send({ kind: 'refused', message: messageOf(error) });
  }
}

/** Compiles Python and runs nothing in it once, which takes most of what its first run would. */
function warm(memoryBytes: number): void {
  const nothing = new MemoryFiles({ diskBytes: 2 ** 20, inodes: 10 });
  const ignored = () => {};
  openPython(memoryBytes).run(nothing, {
    source: '',
    stdin: '',
    output: ignored,
    onRunning: ignored,
  });
  send({ kind: 'ready' });
}

async function serve({ header, body }: Frame): Promise<void> {
  try {
    if (header.kind === 'run') await run(header, body);
    else if (header.kind === 'unpack') unpack(header, body);
    else if (header.kind === 'warm') warm(header.memoryBytes);
  } catch (error) {
    files = null;
    send({ kind: 'failed', message: messageOf(error) });
  }
}

const reader = new FrameReader(MAX_BODY_BYTES);
let queue: Promise<void> = quickjs.load().then(() => send({ kind: 'ready' }));
process.stdin.on('data', (chunk: Buffer) => {
  for (const each of reader.add(chunk)) queue = queue.then(() => serve(each));
});
// The driver is gone.
process.stdin.on('end', () => process.exit());
