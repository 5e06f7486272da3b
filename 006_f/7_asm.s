
/tmp/tmpqcn8oyde.o:     file format elf64-x86-64


Disassembly of section .ltext:

0000000000000000 <k0_f_add0>:
   0:	movabs $0x0,%rax
   a:	vbroadcastss (%rax),%zmm0
  10:	cmp    %r8,%rcx
  13:	jge    42 <k0_f_add0+0x42>
  15:	data16 cs nopw 0x0(%rax,%rax,1)
  20:	vaddps (%rdi),%zmm0,%zmm1
  26:	vaddps 0x40(%rdi),%zmm0,%zmm2
  2d:	inc    %rcx
  30:	vmovups %zmm1,(%rsi)
  36:	vmovups %zmm2,0x40(%rsi)
  3d:	cmp    %r8,%rcx
  40:	jl     20 <k0_f_add0+0x20>
  42:	vzeroupper
  45:	ret
  46:	cs nopw 0x0(%rax,%rax,1)

0000000000000050 <k1_body>:
  50:	push   %rbp
  51:	push   %r15
  53:	push   %r14
  55:	push   %r13
  57:	push   %r12
  59:	push   %rbx
  5a:	sub    $0x78,%rsp
  5e:	movabs $0x0,%rax
  68:	mov    %rcx,%r14
  6b:	shl    $0x5,%r14
  6f:	movabs $0x0,%r12
  79:	mov    %r8,%rbx
  7c:	mov    %rcx,%rbp
  7f:	mov    %rdx,%r15
  82:	mov    %rdi,%r13
  85:	mov    %rsi,0x8(%rsp)
  8a:	vbroadcastss (%rax),%ymm0
  8f:	movabs $0x0,%rax
  99:	vbroadcastss (%rax),%ymm2
  9e:	movabs $0x0,%rax
  a8:	vbroadcastss (%rax),%ymm1
  ad:	vmovups %ymm0,0x50(%rsp)
  b3:	vmovups %ymm2,0x30(%rsp)
  b9:	vmovups %ymm1,0x10(%rsp)
  bf:	jmp    ed <k1_body+0x9d>
  c1:	data16 data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
  d0:	vmovups 0x0(%r13,%r14,1),%ymm0
  d7:	mov    0x8(%rsp),%rax
  dc:	inc    %rbp
  df:	vaddps %ymm0,%ymm0,%ymm0
  e3:	vmovups %ymm0,(%rax,%r14,1)
  e9:	add    $0x20,%r14
  ed:	cmp    %rbx,%rbp
  f0:	jge    1e2 <k1_body+0x192>
  f6:	vmovups 0x0(%r13,%r14,1),%ymm0
  fd:	vmovups 0x50(%rsp),%ymm1
 103:	vmovdqu 0x10(%rsp),%ymm2
 109:	xor    %eax,%eax
 10b:	vcmpltps 0x30(%rsp),%ymm0,%k0
 117:	vmaxps %ymm0,%ymm1,%ymm1
 11b:	vextractf128 $0x1,%ymm1,%xmm0
 121:	vcmpunordps %ymm1,%ymm1,%k1
 128:	kortestb %k0,%k0
 12c:	setae  %al
 12f:	vmaxps %ymm0,%ymm1,%ymm0
 133:	vpternlogd $0xe0,%ymm2,%ymm1,%ymm0
 13a:	vmovaps %ymm1,%ymm0{%k1}
 140:	vshufpd $0x1,%xmm0,%xmm0,%xmm1
 145:	vcmpunordps %ymm0,%ymm0,%k1
 14c:	vmaxps %xmm1,%xmm0,%xmm1
 150:	vpternlogd $0xe0,%ymm2,%ymm0,%ymm1
 157:	vmovaps %ymm0,%ymm1{%k1}
 15d:	vmovshdup %xmm1,%xmm0
 161:	vcmpunordss %xmm1,%xmm1,%k1
 168:	vmaxss %xmm0,%xmm1,%xmm0
 16c:	vpternlogd $0xa8,%xmm0,%xmm1,%xmm2
 173:	vmovss %xmm1,%xmm2,%xmm2{%k1}
 179:	vmovss %xmm2,0x40(%r15)
 17f:	mov    %eax,(%r15)
 182:	jb     d0 <k1_body+0x80>
 188:	vmovss 0x40(%r15),%xmm0
 18e:	mov    $0x5,%edi
 193:	lea    0xc0(%r15),%rdx
 19a:	xor    %esi,%esi
 19c:	vmovss %xmm0,0xc0(%r15)
 1a5:	movl   $0x42c60000,(%r15)
 1ac:	mov    %ebp,0x80(%r15)
 1b3:	vzeroupper
 1b6:	call   *%r12
 1b9:	mov    $0x5,%edi
 1be:	mov    $0x1,%esi
 1c3:	mov    %r15,%rdx
 1c6:	call   *%r12
 1c9:	mov    $0x5,%edi
 1ce:	mov    $0x2,%esi
 1d3:	lea    0x80(%r15),%rdx
 1da:	call   *%r12
 1dd:	jmp    d0 <k1_body+0x80>
 1e2:	add    $0x78,%rsp
 1e6:	pop    %rbx
 1e7:	pop    %r12
 1e9:	pop    %r13
 1eb:	pop    %r14
 1ed:	pop    %r15
 1ef:	pop    %rbp
 1f0:	vzeroupper
 1f3:	ret
 1f4:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000200 <k2_f_sub0>:
 200:	movabs $0x0,%rax
 20a:	vbroadcastss (%rax),%zmm0
 210:	cmp    %r8,%rcx
 213:	jge    24e <k2_f_sub0+0x4e>
 215:	data16 cs nopw 0x0(%rax,%rax,1)
 220:	vmovups (%rdi),%zmm1
 226:	vmovups 0x40(%rdi),%zmm2
 22d:	inc    %rcx
 230:	vsubps %zmm0,%zmm1,%zmm1
 236:	vmovups %zmm1,(%rsi)
 23c:	vsubps %zmm0,%zmm2,%zmm1
 242:	vmovups %zmm1,0x40(%rsi)
 249:	cmp    %r8,%rcx
 24c:	jl     220 <k2_f_sub0+0x20>
 24e:	vzeroupper
 251:	ret
 252:	data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000260 <k3_body>:
 260:	push   %rbp
 261:	push   %r15
 263:	push   %r14
 265:	push   %r13
 267:	push   %r12
 269:	push   %rbx
 26a:	sub    $0x78,%rsp
 26e:	movabs $0x0,%rax
 278:	mov    %rcx,%r14
 27b:	shl    $0x5,%r14
 27f:	movabs $0x0,%r12
 289:	mov    %r8,%rbx
 28c:	mov    %rcx,%rbp
 28f:	mov    %rdx,%r15
 292:	mov    %rdi,%r13
 295:	mov    %rsi,0x8(%rsp)
 29a:	vbroadcastss (%rax),%ymm0
 29f:	movabs $0x0,%rax
 2a9:	vbroadcastss (%rax),%ymm2
 2ae:	movabs $0x0,%rax
 2b8:	vbroadcastss (%rax),%ymm1
 2bd:	vmovups %ymm0,0x50(%rsp)
 2c3:	vmovups %ymm2,0x30(%rsp)
 2c9:	vmovups %ymm1,0x10(%rsp)
 2cf:	jmp    2fd <k3_body+0x9d>
 2d1:	data16 data16 data16 data16 data16 cs nopw 0x0(%rax,%rax,1)
 2e0:	vmovups 0x0(%r13,%r14,1),%ymm0
 2e7:	mov    0x8(%rsp),%rax
 2ec:	inc    %rbp
 2ef:	vaddps %ymm0,%ymm0,%ymm0
 2f3:	vmovups %ymm0,(%rax,%r14,1)
 2f9:	add    $0x20,%r14
 2fd:	cmp    %rbx,%rbp
 300:	jge    3f2 <k3_body+0x192>
 306:	vmovups 0x0(%r13,%r14,1),%ymm0
 30d:	vmovups 0x50(%rsp),%ymm1
 313:	vmovdqu 0x10(%rsp),%ymm2
 319:	xor    %eax,%eax
 31b:	vcmpltps 0x30(%rsp),%ymm0,%k0
 327:	vmaxps %ymm0,%ymm1,%ymm1
 32b:	vextractf128 $0x1,%ymm1,%xmm0
 331:	vcmpunordps %ymm1,%ymm1,%k1
 338:	kortestb %k0,%k0
 33c:	setae  %al
 33f:	vmaxps %ymm0,%ymm1,%ymm0
 343:	vpternlogd $0xe0,%ymm2,%ymm1,%ymm0
 34a:	vmovaps %ymm1,%ymm0{%k1}
 350:	vshufpd $0x1,%xmm0,%xmm0,%xmm1
 355:	vcmpunordps %ymm0,%ymm0,%k1
 35c:	vmaxps %xmm1,%xmm0,%xmm1
 360:	vpternlogd $0xe0,%ymm2,%ymm0,%ymm1
 367:	vmovaps %ymm0,%ymm1{%k1}
 36d:	vmovshdup %xmm1,%xmm0
 371:	vcmpunordss %xmm1,%xmm1,%k1
 378:	vmaxss %xmm0,%xmm1,%xmm0
 37c:	vpternlogd $0xa8,%xmm0,%xmm1,%xmm2
 383:	vmovss %xmm1,%xmm2,%xmm2{%k1}
 389:	vmovss %xmm2,0x40(%r15)
 38f:	mov    %eax,(%r15)
 392:	jb     2e0 <k3_body+0x80>
 398:	vmovss 0x40(%r15),%xmm0
 39e:	mov    $0x6,%edi
 3a3:	xor    %esi,%esi
 3a5:	mov    %r15,%rdx
 3a8:	vmovss %xmm0,(%r15)
 3ad:	movl   $0x41c40000,0xc0(%r15)
 3b8:	mov    %ebp,0x80(%r15)
 3bf:	vzeroupper
 3c2:	call   *%r12
 3c5:	mov    $0x6,%edi
 3ca:	mov    $0x1,%esi
 3cf:	lea    0xc0(%r15),%rdx
 3d6:	call   *%r12
 3d9:	mov    $0x6,%edi
 3de:	mov    $0x2,%esi
 3e3:	lea    0x80(%r15),%rdx
 3ea:	call   *%r12
 3ed:	jmp    2e0 <k3_body+0x80>
 3f2:	add    $0x78,%rsp
 3f6:	pop    %rbx
 3f7:	pop    %r12
 3f9:	pop    %r13
 3fb:	pop    %r14
 3fd:	pop    %r15
 3ff:	pop    %rbp
 400:	vzeroupper
 403:	ret
 404:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000410 <pbk_task0>:
 410:	push   %rax
 411:	shl    $0x6,%rcx
 415:	mov    %rsi,%rax
 418:	mov    (%rdi),%r10
 41b:	mov    0x8(%rdi),%rsi
 41f:	add    0x10(%rdi),%rcx
 423:	movabs $0x0,%r9
 42d:	mov    %rdx,%r8
 430:	mov    %rcx,%rdx
 433:	mov    %r10,%rdi
 436:	mov    %rax,%rcx
 439:	call   *%r9
 43c:	pop    %rax
 43d:	ret
 43e:	xchg   %ax,%ax

0000000000000440 <pbk_task1>:
 440:	push   %rax
 441:	shl    $0x8,%rcx
 445:	mov    %rsi,%rax
 448:	mov    (%rdi),%r10
 44b:	mov    0x8(%rdi),%rsi
 44f:	add    0x10(%rdi),%rcx
 453:	movabs $0x0,%r9
 45d:	mov    %rdx,%r8
 460:	mov    %rcx,%rdx
 463:	mov    %r10,%rdi
 466:	mov    %rax,%rcx
 469:	call   *%r9
 46c:	pop    %rax
 46d:	ret
 46e:	xchg   %ax,%ax

0000000000000470 <pbk_task2>:
 470:	push   %rax
 471:	shl    $0x6,%rcx
 475:	mov    %rsi,%rax
 478:	mov    (%rdi),%r10
 47b:	mov    0x8(%rdi),%rsi
 47f:	add    0x10(%rdi),%rcx
 483:	movabs $0x0,%r9
 48d:	mov    %rdx,%r8
 490:	mov    %rcx,%rdx
 493:	mov    %r10,%rdi
 496:	mov    %rax,%rcx
 499:	call   *%r9
 49c:	pop    %rax
 49d:	ret
 49e:	xchg   %ax,%ax

00000000000004a0 <pbk_task3>:
 4a0:	push   %rax
 4a1:	shl    $0x8,%rcx
 4a5:	mov    %rsi,%rax
 4a8:	mov    (%rdi),%r10
 4ab:	mov    0x8(%rdi),%rsi
 4af:	add    0x10(%rdi),%rcx
 4b3:	movabs $0x0,%r9
 4bd:	mov    %rdx,%r8
 4c0:	mov    %rcx,%rdx
 4c3:	mov    %r10,%rdi
 4c6:	mov    %rax,%rcx
 4c9:	call   *%r9
 4cc:	pop    %rax
 4cd:	ret
 4ce:	xchg   %ax,%ax

00000000000004d0 <pbk_main>:
 4d0:	push   %r15
 4d2:	push   %r14
 4d4:	push   %r12
 4d6:	push   %rbx
 4d7:	sub    $0x68,%rsp
 4db:	mov    (%rsi),%rax
 4de:	mov    %rdx,%rbx
 4e1:	lea    0x100(%rdx),%r15
 4e8:	lea    0x50(%rsp),%rdi
 4ed:	mov    %rsi,%r14
 4f0:	xor    %esi,%esi
 4f2:	xor    %ecx,%ecx
 4f4:	mov    %rax,0x50(%rsp)
 4f9:	mov    %rdx,0x58(%rsp)
 4fe:	movabs $0x0,%rax
 508:	mov    $0x1,%edx
 50d:	mov    %r15,0x60(%rsp)
 512:	call   *%rax
 514:	lea    0x80(%rbx),%r12
 51b:	movabs $0x0,%rax
 525:	lea    0x38(%rsp),%rdi
 52a:	mov    $0x4,%edx
 52f:	mov    %rbx,0x38(%rsp)
 534:	xor    %esi,%esi
 536:	xor    %ecx,%ecx
 538:	mov    %r12,0x40(%rsp)
 53d:	mov    %r15,0x48(%rsp)
 542:	call   *%rax
 544:	movabs $0x0,%rax
 54e:	lea    0x20(%rsp),%rdi
 553:	mov    $0x1,%edx
 558:	mov    %r12,0x20(%rsp)
 55d:	mov    %rbx,0x28(%rsp)
 562:	mov    %r15,0x30(%rsp)
 567:	xor    %esi,%esi
 569:	xor    %ecx,%ecx
 56b:	call   *%rax
 56d:	mov    0x8(%r14),%rax
 571:	mov    %rbx,0x8(%rsp)
 576:	lea    0x8(%rsp),%rdi
 57b:	mov    $0x4,%edx
 580:	xor    %esi,%esi
 582:	xor    %ecx,%ecx
 584:	mov    %rax,0x10(%rsp)
 589:	movabs $0x0,%rax
 593:	mov    %r15,0x18(%rsp)
 598:	call   *%rax
 59a:	add    $0x68,%rsp
 59e:	pop    %rbx
 59f:	pop    %r12
 5a1:	pop    %r14
 5a3:	pop    %r15
 5a5:	ret
 5a6:	cs nopw 0x0(%rax,%rax,1)

00000000000005b0 <pbk_run>:
 5b0:	push   %r15
 5b2:	push   %r14
 5b4:	push   %r13
 5b6:	push   %r12
 5b8:	push   %rbx
 5b9:	sub    $0x10,%rsp
 5bd:	mov    %rsi,%rbx
 5c0:	movabs $0x0,%r15
 5ca:	movabs $0x0,%rax
 5d4:	lea    0x8(%rsp),%rcx
 5d9:	mov    $0x1000,%esi
 5de:	mov    $0x1000,%edx
 5e3:	mov    %rdi,%r14
 5e6:	mov    %r15,%rdi
 5e9:	call   *%rax
 5eb:	mov    0x8(%rsp),%r13
 5f0:	mov    %rax,%r12
 5f3:	movabs $0x0,%rax
 5fd:	mov    %r14,%rdi
 600:	mov    %rbx,%rsi
 603:	mov    %r13,%rdx
 606:	call   *%rax
 608:	movabs $0x0,%rax
 612:	mov    %r15,%rdi
 615:	mov    %r13,%rsi
 618:	mov    %r12,%rdx
 61b:	call   *%rax
 61d:	add    $0x10,%rsp
 621:	pop    %rbx
 622:	pop    %r12
 624:	pop    %r13
 626:	pop    %r14
 628:	pop    %r15
 62a:	ret
 62b:	nopl   0x0(%rax,%rax,1)

0000000000000630 <pbk_call>:
 630:	push   %rax
 631:	movabs $0x0,%rax
 63b:	mov    %rdi,%rsi
 63e:	xor    %edi,%edi
 640:	call   *%rax
 642:	pop    %rax
 643:	ret
 644:	data16 data16 cs nopw 0x0(%rax,%rax,1)

0000000000000650 <pbk_handler>:
 650:	mov    0x8(%rdi),%rax
 654:	test   %rax,%rax
 657:	je     688 <pbk_handler+0x38>
 659:	cmpl   $0x1,0x8(%rax)
 65d:	sete   %cl
 660:	test   %cl,%cl
 662:	je     68e <pbk_handler+0x3e>
 664:	mov    0x18(%rax),%rax
 668:	movabs $0x300000000,%rcx
 672:	mov    %rcx,0x18(%rax)
 676:	movl   $0x0,0x20(%rax)
 67d:	movq   $0x0,0x28(%rax)
 685:	xor    %eax,%eax
 687:	ret
 688:	xor    %ecx,%ecx
 68a:	test   %cl,%cl
 68c:	jne    664 <pbk_handler+0x14>
 68e:	sub    $0x18,%rsp
 692:	mov    0x48(%rdi),%rax
 696:	mov    0x70(%rdi),%rcx
 69a:	lea    0x8(%rsp),%rsi
 69f:	mov    (%rax),%rax
 6a2:	mov    0x18(%rax),%rax
 6a6:	mov    %rax,0x8(%rsp)
 6ab:	mov    (%rcx),%rax
 6ae:	mov    0x18(%rax),%rax
 6b2:	mov    %rax,0x10(%rsp)
 6b7:	movabs $0x0,%rax
 6c1:	call   *%rax
 6c3:	add    $0x18,%rsp
 6c7:	xor    %eax,%eax
 6c9:	ret
 6ca:	nopw   0x0(%rax,%rax,1)

00000000000006d0 <_mlir_k0_f_add0>:
 6d0:	push   %rax
 6d1:	mov    (%rdi),%rax
 6d4:	mov    0x10(%rdi),%rdx
 6d8:	mov    0x8(%rdi),%rcx
 6dc:	mov    0x18(%rdi),%r8
 6e0:	mov    0x20(%rdi),%rdi
 6e4:	movabs $0x0,%r9
 6ee:	mov    (%rcx),%rsi
 6f1:	mov    (%r8),%rcx
 6f4:	mov    (%rax),%rax
 6f7:	mov    (%rdi),%r8
 6fa:	mov    (%rdx),%rdx
 6fd:	mov    %rax,%rdi
 700:	call   *%r9
 703:	pop    %rax
 704:	ret
 705:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000710 <_mlir_k1_body>:
 710:	push   %rax
 711:	mov    (%rdi),%rax
 714:	mov    0x10(%rdi),%rdx
 718:	mov    0x8(%rdi),%rcx
 71c:	mov    0x18(%rdi),%r8
 720:	mov    0x20(%rdi),%rdi
 724:	movabs $0x0,%r9
 72e:	mov    (%rcx),%rsi
 731:	mov    (%r8),%rcx
 734:	mov    (%rax),%rax
 737:	mov    (%rdi),%r8
 73a:	mov    (%rdx),%rdx
 73d:	mov    %rax,%rdi
 740:	call   *%r9
 743:	pop    %rax
 744:	ret
 745:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000750 <_mlir_k2_f_sub0>:
 750:	push   %rax
 751:	mov    (%rdi),%rax
 754:	mov    0x10(%rdi),%rdx
 758:	mov    0x8(%rdi),%rcx
 75c:	mov    0x18(%rdi),%r8
 760:	mov    0x20(%rdi),%rdi
 764:	movabs $0x0,%r9
 76e:	mov    (%rcx),%rsi
 771:	mov    (%r8),%rcx
 774:	mov    (%rax),%rax
 777:	mov    (%rdi),%r8
 77a:	mov    (%rdx),%rdx
 77d:	mov    %rax,%rdi
 780:	call   *%r9
 783:	pop    %rax
 784:	ret
 785:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000790 <_mlir_k3_body>:
 790:	push   %rax
 791:	mov    (%rdi),%rax
 794:	mov    0x10(%rdi),%rdx
 798:	mov    0x8(%rdi),%rcx
 79c:	mov    0x18(%rdi),%r8
 7a0:	mov    0x20(%rdi),%rdi
 7a4:	movabs $0x0,%r9
 7ae:	mov    (%rcx),%rsi
 7b1:	mov    (%r8),%rcx
 7b4:	mov    (%rax),%rax
 7b7:	mov    (%rdi),%r8
 7ba:	mov    (%rdx),%rdx
 7bd:	mov    %rax,%rdi
 7c0:	call   *%r9
 7c3:	pop    %rax
 7c4:	ret
 7c5:	data16 cs nopw 0x0(%rax,%rax,1)

00000000000007d0 <_mlir_pbk_task0>:
 7d0:	push   %rax
 7d1:	mov    (%rdi),%rax
 7d4:	mov    0x10(%rdi),%rdx
 7d8:	mov    0x8(%rdi),%rcx
 7dc:	mov    0x18(%rdi),%rdi
 7e0:	movabs $0x0,%r8
 7ea:	mov    (%rcx),%rsi
 7ed:	mov    (%rax),%rax
 7f0:	mov    (%rdi),%rcx
 7f3:	mov    (%rdx),%rdx
 7f6:	mov    %rax,%rdi
 7f9:	call   *%r8
 7fc:	pop    %rax
 7fd:	ret
 7fe:	xchg   %ax,%ax

0000000000000800 <_mlir_pbk_task1>:
 800:	push   %rax
 801:	mov    (%rdi),%rax
 804:	mov    0x10(%rdi),%rdx
 808:	mov    0x8(%rdi),%rcx
 80c:	mov    0x18(%rdi),%rdi
 810:	movabs $0x0,%r8
 81a:	mov    (%rcx),%rsi
 81d:	mov    (%rax),%rax
 820:	mov    (%rdi),%rcx
 823:	mov    (%rdx),%rdx
 826:	mov    %rax,%rdi
 829:	call   *%r8
 82c:	pop    %rax
 82d:	ret
 82e:	xchg   %ax,%ax

0000000000000830 <_mlir_pbk_task2>:
 830:	push   %rax
 831:	mov    (%rdi),%rax
 834:	mov    0x10(%rdi),%rdx
 838:	mov    0x8(%rdi),%rcx
 83c:	mov    0x18(%rdi),%rdi
 840:	movabs $0x0,%r8
 84a:	mov    (%rcx),%rsi
 84d:	mov    (%rax),%rax
 850:	mov    (%rdi),%rcx
 853:	mov    (%rdx),%rdx
 856:	mov    %rax,%rdi
 859:	call   *%r8
 85c:	pop    %rax
 85d:	ret
 85e:	xchg   %ax,%ax

0000000000000860 <_mlir_pbk_task3>:
 860:	push   %rax
 861:	mov    (%rdi),%rax
 864:	mov    0x10(%rdi),%rdx
 868:	mov    0x8(%rdi),%rcx
 86c:	mov    0x18(%rdi),%rdi
 870:	movabs $0x0,%r8
 87a:	mov    (%rcx),%rsi
 87d:	mov    (%rax),%rax
 880:	mov    (%rdi),%rcx
 883:	mov    (%rdx),%rdx
 886:	mov    %rax,%rdi
 889:	call   *%r8
 88c:	pop    %rax
 88d:	ret
 88e:	xchg   %ax,%ax

0000000000000890 <_mlir_pbk_main>:
 890:	push   %rax
 891:	mov    (%rdi),%rax
 894:	mov    0x10(%rdi),%rdx
 898:	mov    0x8(%rdi),%rcx
 89c:	mov    (%rax),%rax
 89f:	mov    (%rcx),%rsi
 8a2:	mov    (%rdx),%rdx
 8a5:	movabs $0x0,%rcx
 8af:	mov    %rax,%rdi
 8b2:	call   *%rcx
 8b4:	pop    %rax
 8b5:	ret
 8b6:	cs nopw 0x0(%rax,%rax,1)

00000000000008c0 <_mlir_pbk_run>:
 8c0:	push   %rax
 8c1:	mov    0x8(%rdi),%rcx
 8c5:	mov    (%rdi),%rax
 8c8:	mov    (%rax),%rdi
 8cb:	mov    (%rcx),%rsi
 8ce:	movabs $0x0,%rax
 8d8:	call   *%rax
 8da:	pop    %rax
 8db:	ret
 8dc:	nopl   0x0(%rax)

00000000000008e0 <_mlir_pbk_call>:
 8e0:	push   %rax
 8e1:	mov    (%rdi),%rax
 8e4:	mov    (%rax),%rdi
 8e7:	movabs $0x0,%rax
 8f1:	call   *%rax
 8f3:	pop    %rax
 8f4:	ret
 8f5:	data16 cs nopw 0x0(%rax,%rax,1)

0000000000000900 <_mlir_pbk_handler>:
 900:	push   %rbx
 901:	mov    (%rdi),%rax
 904:	mov    %rdi,%rbx
 907:	mov    (%rax),%rdi
 90a:	movabs $0x0,%rax
 914:	call   *%rax
 916:	mov    0x8(%rbx),%rcx
 91a:	mov    %rax,(%rcx)
 91d:	pop    %rbx
 91e:	ret

