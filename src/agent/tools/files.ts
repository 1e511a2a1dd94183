import { z } from 'zod';
import { LonghaulError, type Tool, type ToolResult } from '../../core/index.ts';
import { cut } from '../observation.ts';

/** What the model got wrong about a path is an observation; what the host did wrong is thrown on. */
async function orObservation(work: () => Promise<string>): Promise<ToolResult> {
  try {
    return { output: await work() };
  } catch (error) {
    if (error instanceof LonghaulError && error.class === 'usage')
      return { output: error.message, isError: true };
    throw error;
  }
}

const ReadInput = z.object({
  path: z.string().min(1).describe('Relative to the working directory, or absolute.'),
  first_line: z.number().int().min(1).optional(),
  last_line: z.number().int().min(1).optional(),
});

export const readFile: Tool = {
  name: 'read_file',
  description: 'Read a text file, whole or a range of lines.',
  input: ReadInput,
  effect: 'none',
  timeoutMs: 30_000,
  run(input, { sandbox }) {
    const { path, first_line = 1, last_line } = input as z.infer<typeof ReadInput>;
    return orObservation(async () => {
      const text = new TextDecoder().decode(await sandbox.readFile(path));
      if (first_line === 1 && last_line === undefined) return cut(text);
      return cut(
        text
          .split('\n')
          .slice(first_line - 1, last_line)
          .join('\n'),
      );
    });
  },
};

const WriteInput = z.object({ path: z.string().min(1), content: z.string() });

export const writeFile: Tool = {
  name: 'write_file',
  description: 'Create or replace a file. Missing directories are made.',
  input: WriteInput,
  effect: 'workspace',
  timeoutMs: 30_000,
  run(input, { sandbox }) {
    const { path, content } = input as z.infer<typeof WriteInput>;
    return orObservation(async () => {
      await sandbox.writeFile(path, content);
      return `Wrote ${Buffer.byteLength(content)} bytes to ${path}.`;
    });
  },
};

const EditInput = z.object({
  path: z.string().min(1),
  old: z.string().min(1).describe('Text that occurs exactly once in the file.'),
  new: z.string(),
});

export const editFile: Tool = {
  name: 'edit_file',
  description: 'Replace a piece of text that occurs exactly once in a file.',
  input: EditInput,
  effect: 'workspace',
  timeoutMs: 30_000,
  async run(input, { sandbox }) {
    const { path, old, new: replacement } = input as z.infer<typeof EditInput>;
    let text = '';
    const read = await orObservation(async () => {
      text = new TextDecoder('utf-8', { fatal: true }).decode(await sandbox.readFile(path));
      return '';
    }).catch((error: unknown) => {
      if (error instanceof TypeError)
        return { output: `${path} is not UTF-8 text.`, isError: true };
      throw error;
    });
    if (read.isError) return read;
    const count = text.split(old).length - 1;
    if (count !== 1) {
      return {
        output: `The old text occurs ${count} times in ${path}; it must occur exactly once.`,
        isError: true,
      };
    }
    return orObservation(async () => {
      await sandbox.writeFile(
        path,
        text.replace(old, () => replacement),
      );
      return `Edited ${path}.`;
    });
  },
};

const ListInput = z.object({
  path: z.string().optional().describe('Default: the working directory.'),
});

export const listFiles: Tool = {
  name: 'list_files',
  description: 'List a directory.',
  input: ListInput,
  effect: 'none',
  timeoutMs: 30_000,
  run(input, { sandbox }) {
    const { path = '.' } = input as z.infer<typeof ListInput>;
    return orObservation(async () => {
      const entries = await sandbox.listFiles(path);
      if (entries.length === 0) return '[empty]';
      return cut(
        entries
          .map((entry) =>
            entry.kind === 'directory' ? `${entry.name}/` : `${entry.name}  ${entry.bytes} bytes`,
          )
          .join('\n'),
      );
    });
  },
};
