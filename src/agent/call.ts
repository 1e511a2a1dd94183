import { z } from 'zod';
import {
  LonghaulError,
  type Tool,
  type ToolCall,
  type ToolContext,
  type ToolResult,
} from '../core/index.ts';

/**
 * Runs one call the way a model asked for it. What the model got wrong (no such tool, invalid input)
 * is an observation it can correct; what the guest did is the tool's own result; what the host caused
 * is thrown.
 */
export async function runCall(
  tools: readonly Tool[],
  call: ToolCall,
  context: Omit<ToolContext, 'signal'> & { signal: AbortSignal },
): Promise<ToolResult> {
  const checked = checkCall(tools, call);
  if ('observation' in checked) return { output: checked.observation, isError: true };
  const result = await checked.tool.run(checked.input, context);
  if (context.signal.aborted)
    throw new LonghaulError('Interrupted', `${call.tool} was interrupted`);
  return result;
}

/** The tool and its parsed input, or what to tell the model instead. */
export function checkCall(
  tools: readonly Tool[],
  call: ToolCall,
): { tool: Tool; input: unknown } | { observation: string } {
  const tool = tools.find((candidate) => candidate.name === call.tool);
  if (tool === undefined) {
    return {
      observation: `There is no tool "${call.tool}". Tools: ${tools.map((t) => t.name).join(', ')}.`,
    };
  }
  if (typeof call.input === 'string') {
    return {
      observation: `The arguments of ${call.tool} are not valid JSON. Send one JSON object: ${shape(tool)}`,
    };
  }
  const parsed = tool.input.safeParse(call.input ?? {});
  if (!parsed.success) {
    const issues = parsed.error.issues
      .slice(0, 5)
      .map((issue) => `${issue.path.join('.') || '(input)'}: ${issue.message}`)
      .join('; ');
    return {
      observation: `Invalid arguments for ${call.tool}: ${issues}. Expected: ${shape(tool)}`,
    };
  }
  return { tool, input: parsed.data };
}

function shape(tool: Tool): string {
  return JSON.stringify(z.toJSONSchema(tool.input, { unrepresentable: 'any' }));
}
