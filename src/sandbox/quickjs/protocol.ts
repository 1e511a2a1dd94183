/** JSON lines between the driver and the process that runs the snippets. Bytes are base64. */
export interface SnippetBatch {
  id: number;
  memoryBytes: number;
  diskBytes: number;
  inodes: number;
  keepBytes: number;
  /** The workspace: path and content. */
  files: [path: string, content: string][];
  snippets: { source: string; stdin: string; timeoutMs: number }[];
}

export interface SnippetResult {
  cause: 'exited' | 'timeout' | 'out_of_memory';
  code: number | null;
  stdout: { head: string; tail: string; total: number };
  stderr: { head: string; tail: string; total: number };
  ms: number;
}

/** One answer per snippet, as it ends, with the files it wrote. */
export interface SnippetAnswer {
  id: number;
  index: number;
  result: SnippetResult;
  written: [path: string, content: string][];
  /** Resident memory of the process: WebAssembly memory never shrinks, so it is replaced when large. */
  heldBytes: number;
}
