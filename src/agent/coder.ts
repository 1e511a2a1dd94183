import type { SandboxCapabilities } from '../sandbox/contract.ts';
import type { AgentDefinition } from './contract.ts';
import { executeCode } from './tools/code.ts';
import { editFile, listFiles, readFile, writeFile } from './tools/files.ts';
import { shell } from './tools/shell.ts';

const SYSTEM = `You are a careful software engineer working alone in a sandboxed Linux workspace at /workspace.
Work in small steps: look before you change, run what you wrote, read errors and correct them.
Nobody answers questions; decide yourself. There is no network.
When the task is done and checked, reply with a short summary and no tool call.`;

/** The agent that works on coding tasks: shell, files and code execution, as far as the sandbox has them. */
export function coder(capabilities: SandboxCapabilities): AgentDefinition {
  return {
    name: 'coder',
    system: SYSTEM,
    tools: [
      ...(capabilities.exec ? [shell] : []),
      readFile,
      writeFile,
      editFile,
      listFiles,
      executeCode(capabilities.languages),
    ],
    maxOutputTokens: 4096,
    sampling: { temperature: 0 },
  };
}
