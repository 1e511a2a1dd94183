import type { Effect } from '../core/index.ts';
import type { SandboxCapabilities, SandboxSpec } from '../sandbox/contract.ts';
import type { AgentDefinition } from './contract.ts';
import { executeCode } from './tools/code.ts';
import { editFile, listFiles, readFile, writeFile } from './tools/files.ts';
import { shell } from './tools/shell.ts';

function system({ image = 'host', network = 'none' }: Partial<SandboxSpec>): string {
  const place =
    image === 'host' ? 'a sandboxed Linux workspace at /workspace' : 'a sandboxed Linux system';
  return `You are a careful software engineer working alone in ${place}.
Work in small steps: look before you change, run what you wrote, read errors and correct them.
Nobody answers questions; decide yourself. ${network === 'none' ? 'There is no network.' : 'Little of the network can be reached; what you do there cannot be undone.'}
When the task is done and checked, reply with a short summary and no tool call.`;
}

/**
 * What running a program may have done when nobody knows how it ended. Without a network its only effect is
 * on files, which are rolled back; with one it may have reached the world, and is not repeated unasked.
 */
function effectOf({ network = 'none' }: Partial<SandboxSpec>): Effect {
  return network === 'none' ? 'workspace' : 'once';
}

/**
 * The agent that works on coding tasks: shell, files and code execution, as far as the sandbox has them.
 *
 * @param spec of the sandbox that it works in
 */
export function coder(
  capabilities: SandboxCapabilities,
  spec: Partial<SandboxSpec> = {},
): AgentDefinition {
  const effect = effectOf(spec);
  return {
    name: 'coder',
    system: system(spec),
    tools: [
      ...(capabilities.exec ? [shell(effect)] : []),
      readFile,
      writeFile,
      editFile,
      listFiles,
      executeCode(capabilities.languages, effect),
    ],
    maxOutputTokens: 4096,
    sampling: { temperature: 0 },
  };
}
