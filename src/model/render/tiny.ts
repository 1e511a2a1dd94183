import { createHash } from 'node:crypto';
import { type AssistantMessage, LonghaulError, type Message } from '../../core/index.ts';
import type { Renderer } from './renderer.ts';

/** Ids below this are special; the printable ASCII characters follow, space first. */
const SPECIAL = ['<pad>', '<begin>', '<end>'] as const;
const BEGIN = 1;
const END = 2;
const CHARACTERS = Array.from({ length: 95 }, (_, i) => String.fromCharCode(0x20 + i)).join('');
const FIRST = SPECIAL.length;
const UNKNOWN = FIRST + CHARACTERS.indexOf('?');

/** The tool that an answer becomes a call of. */
const TOOL = 'submit';

/**
 * A special id inside an answer stands in text as a private-use character, so that an answer becomes the
 * same ids again. In text from users and tools these characters are unknown ones, never special.
 */
const PRIVATE_USE = 0xe000;

const tokenizerHash = hash(JSON.stringify([SPECIAL, CHARACTERS]));
const rendererHash = hash(
  `${tokenizerHash} begin, then contents without separators; an answer is one ${TOOL} call, closed by end`,
);

/**
 * Renderer of the tiny models that are trained from scratch here: characters, no roles. What a user or
 * a tool says goes in as it is and ends by convention in `=`; what follows is the program that the
 * model submits, up to `<end>`. An answer without `<end>` was cut off and becomes plain text.
 */
export const tinyRenderer: Renderer = {
  vocabSize: FIRST + CHARACTERS.length,
  tokenizerHash,
  rendererHash,
  stopTokens: [END],
  prompt(messages) {
    return [BEGIN, ...messages.flatMap(idsOf)];
  },
  parse(ids, ended): AssistantMessage {
    const text = textOf(ended ? ids.slice(0, -1) : ids);
    return ended
      ? {
          role: 'assistant',
          content: '',
          toolCalls: [{ callId: TOOL, tool: TOOL, input: { program: text } }],
        }
      : { role: 'assistant', content: text };
  },
};

/** The ids of one message; a program is followed by `<end>`. */
function idsOf(message: Message): number[] {
  switch (message.role) {
    case 'user':
    case 'tool':
      return encode(message.content);
    case 'assistant':
      return message.toolCalls === undefined
        ? encodeAnswer(message.content)
        : message.toolCalls.flatMap((call) => [...encodeAnswer(programOf(call.input)), END]);
    case 'system':
      throw new LonghaulError('ModelRefused', 'this model takes no system message', {
        next: 'Use an agent without a system message with models of the quickstart.',
      });
  }
}

function programOf(input: unknown): string {
  const program = (input as { program?: unknown } | null)?.program;
  return typeof program === 'string' ? program : '';
}

/** Text from outside as ids; what is not printable ASCII becomes `?`. */
function encode(text: string): number[] {
  return [...text].map((char) => {
    const code = char.codePointAt(0)! - 0x20;
    return code >= 0 && code < CHARACTERS.length ? FIRST + code : UNKNOWN;
  });
}

function encodeAnswer(text: string): number[] {
  return [...text].flatMap((char) => {
    const special = char.codePointAt(0)! - PRIVATE_USE;
    return special >= 0 && special < FIRST ? [special] : encode(char);
  });
}

function textOf(ids: readonly number[]): string {
  return ids
    .map((id) =>
      id < FIRST ? String.fromCharCode(PRIVATE_USE + id) : (CHARACTERS[id - FIRST] ?? '?'),
    )
    .join('');
}

function hash(text: string): string {
  return createHash('sha256').update(text).digest('hex').slice(0, 16);
}
